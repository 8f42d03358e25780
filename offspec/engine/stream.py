"""An answer that is computed as it is read: what `Engine.stream` iterates over."""

import queue
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self

from offspec.core.events import Event, Finished, Mismatch, Result
from offspec.engine.request import Request
from offspec.engine.scheduler import Scheduler

_AHEAD = 2  # passes whose events may wait for the reader, where other sequences share them


class StreamedAnswer:
    """The events of a request for one reader, who sets the pace; a context manager that submits the request.

    A pass begins when the reader has read the events of the one before and waits for more. Where other
    sequences are decoded too, the events of two passes at most wait for the reader, so that it misses no
    shared pass.

    Args:
        request: The request.
        scheduler: Computes the answer.
        progressed: Takes events of the pass under way.
    """

    def __init__(self, request: Request, scheduler: Scheduler, progressed: Callable[[Event], None]) -> None:
        self.request, self.progressed = request, progressed
        self.gaps = list[float]()  # of each token, see `Walk`
        self._scheduler = scheduler
        self._reading = self._cancelled = self._ended = False
        self._error: BaseException | None = None
        self._over = False  # the scheduler has put the last events
        # An interrupt may strike anywhere in a reader; what it loses here is of no use then.
        self._arrived = queue.SimpleQueue[tuple[Sequence[Event], bool, BaseException | None]]()

    def cancel(self) -> None:
        """End it with the text so far."""
        self._cancelled = True

    def cancelled(self) -> bool:
        """Return whether it is to end before its end."""
        return self._cancelled or self.request.halt.is_set()

    def is_due(self, shared: bool) -> bool:
        """Return whether it takes part in the next pass, which others `shared` or not."""
        return self._reading or (shared and self._arrived.qsize() < _AHEAD)

    def put(
        self, events: Sequence[Event], *, ended: bool = False, error: BaseException | None = None
    ) -> None:
        """From the scheduler: the events of a pass, whether they are the last, and why there are no more."""
        self._reading = False
        self._over = ended or error is not None  # before they can be read
        self._arrived.put((events, self._over, error))

    def __enter__(self) -> Self:
        try:
            self._scheduler.submit(self)
        except BaseException:
            self._cancelled = True
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        """Cancel the answer. After an interrupt, wait for the end of its pass.

        A generator that is closed may be closed by the garbage collector, wherever that runs: it never waits.
        """
        self._cancelled = True
        self._scheduler.wake()
        if kind not in (None, GeneratorExit):
            while not (self._over or self._scheduler.is_here):
                self._arrived.get()

    def next_events(self) -> Sequence[Event]:
        """Wait for the events of a pass, and return them; none after the end.

        Raises:
            OffspecError: The error that ended the answer, after its last events.
        """
        events: Sequence[Event] = ()
        while not events and not self._ended:
            if self._arrived.empty():
                self._reading = True
                self._scheduler.wake()
            events, self._ended, self._error = self._arrived.get()
        if not events and self._error is not None:
            raise self._error
        return events

    def checked(self, result: Result) -> Result:
        """The result with its differences from the answer with one token a pass, which is computed now."""
        request = replace(self.request, sources=(), trees=False, fresh=True)
        with StreamedAnswer(request, self._scheduler, self.progressed) as alone:
            while events := alone.next_events():
                last = events[-1]
        assert isinstance(last, Finished)
        return replace(result, mismatches=compared(result, self.gaps, last.result))


def compared(result: Result, gaps: Sequence[float], alone: Result) -> tuple[Mismatch, ...] | None:
    """The first place where an answer differs from that of one token a pass; what follows it is another text.

    Args:
        result: The answer.
        gaps: Of each of its tokens, see `Walk`.
        alone: The other; where it was halted and all is alike so far, nothing is known: None.
    """
    tokens, others = result.token_ids, alone.token_ids
    for place, (token, other) in enumerate(zip(tokens, others, strict=False)):
        if token != other:
            return (Mismatch(place, token, other, gaps[place]),)
    if alone.finish_reason == "halted":
        return None
    if (len(tokens), result.finish_reason) == (len(others), alone.finish_reason):
        return ()
    place = min(len(tokens), len(others))  # one of them ended there, or they ended for other reasons
    said, unspeculated = (ids[place] if place < len(ids) else None for ids in (tokens, others))
    return (Mismatch(place, said, unspeculated, 0.0),)
