"""A turn: what a question makes of the messages before it, and its answer as it comes."""

import time
from collections.abc import Sequence
from dataclasses import replace

from offspec.chat.message import AnswerFigures, Message, checked_text
from offspec.core.config import SamplingParams
from offspec.core.errors import RequestError
from offspec.core.events import Event, Finished, PassStats, Result, TextDelta

_SEEDS = 2**64


def asked(messages: Sequence[Message]) -> list[int]:
    """Where the questions are."""
    return [index for index, message in enumerate(messages) if message.role == "user"]


def with_question(messages: Sequence[Message], text: str) -> list[Message]:
    """One question more. Raises RequestError where it is empty or not valid Unicode."""
    if not text.strip():
        raise RequestError("the question is empty")
    # The answer to one that was asked before may never have come, and they take turns.
    missing = [Message("assistant", "")] if messages and messages[-1].role == "user" else []
    return [*messages, *missing, Message("user", checked_text(text))]


def with_other_question(messages: Sequence[Message], text: str) -> list[Message]:
    """A question in place of the last one and its answer. Raises RequestError, also where there is none."""
    questions = asked(messages)
    if not questions:
        raise RequestError("there is no question to ask differently")
    return with_question(messages[: questions[-1]], text)


def without_answer(messages: Sequence[Message]) -> list[Message]:
    """The last question without its answer, if one came. Raises RequestError where nothing was asked."""
    questions = asked(messages)
    if not questions:
        raise RequestError("there is no answer to try again")
    return list(messages[: questions[-1] + 1])


def seeded_anew(
    params: SamplingParams, last: Message, seeds: tuple[int | None, int | None]
) -> SamplingParams:
    """Parameters for another answer in place of the last message. A fixed seed moves on by one.

    It does so from an answer that was made with it, or by retries from it: seeds are the one that was fixed
    and the one that it has come to. From any other answer it begins with itself.
    """
    made = last.figures.seed if last.figures else None
    if made is None or (made != params.seed and seeds != (params.seed, made)):
        return params
    return replace(params, seed=(made + 1) % _SEEDS)


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
