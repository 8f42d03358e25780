"""An answer as it comes."""

import time

from offspec.chat.message import AnswerFigures, Message
from offspec.core.events import Event, Finished, PassStats, Result, TextDelta


class PartialAnswer:
    """Gathers what a stream of events says, so that it is there whatever ends the stream.

    begun: an event came. seed: the one that was asked for, if any. finish: why it ended, "failed" unless
    something else is known. result: None until the stream has come to its end.
    """

    def __init__(self, seed: int | None, opened: str) -> None:
        """opened: what the prompt has begun the answer with."""
        self.begun = False
        self.finish = "failed"
        self.result: Result | None = None
        self.ids: list[int] = []
        self.seed, self.opened = seed, opened
        self._parts: list[str] = []
        self._passes, self._bytes, self._began = 0, 0, time.perf_counter()

    def hear(self, event: Event) -> None:
        """Take in the next event."""
        self.begun = True
        match event:
            case TextDelta(text=text, token_ids=ids):
                self._parts.append(text)
                self.ids += ids
            case PassStats():
                self._passes += 1
                self._bytes += event.bytes_streamed
            case Finished(result=result):
                self.result, self.finish = result, result.finish_reason

    def so_far(self) -> list[Message]:
        """A message of what came, while more is coming; none where nothing came yet."""
        return [self._message(None)] if self.ids else []

    def message(self) -> Message:
        """The answer, now that it is over."""
        return self._message(self.finish)

    def _message(self, finish: str | None) -> Message:
        ids = tuple(self.ids)
        passes, seconds = self._passes, time.perf_counter() - self._began
        nbytes, seed = self._bytes, self.seed
        if self.result:
            seconds, nbytes, seed = self.result.seconds, self.result.bytes_streamed, self.result.seed
        figures = AnswerFigures(len(ids), passes, seconds, nbytes, seed)
        return Message("assistant", "".join(self._parts), ids, finish, figures, self.opened)
