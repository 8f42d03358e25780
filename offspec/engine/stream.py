"""An answer that is computed as it is read: what `Engine.stream` iterates over."""

import queue
import sys
from collections.abc import Callable, Sequence
from typing import Self

from offspec.core.events import Event
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
        self._reading = self._left = self._ended = False
        self._error: BaseException | None = None
        # Safe with an interrupt at any place, and with a reader that the garbage collector closes.
        self._arrived = queue.SimpleQueue[tuple[Sequence[Event], bool, BaseException | None]]()

    def cancelled(self) -> bool:
        """Return whether it is to end before its end."""
        return self._left or self.request.halt.is_set()

    def is_due(self, shared: bool) -> bool:
        """Return whether it takes part in the next pass, which others `shared` or not."""
        return self._reading or (shared and self._arrived.qsize() < _AHEAD)

    def put(
        self, events: Sequence[Event], *, ended: bool = False, error: BaseException | None = None
    ) -> None:
        """From the scheduler: the events of a pass, whether they are the last, and why there are no more."""
        self._reading = False
        self._arrived.put((events, ended or error is not None, error))

    def __enter__(self) -> Self:
        try:
            self._scheduler.submit(self)
        except BaseException:
            self._left = True
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        """Halt the answer unless it has ended, and wait for its end."""
        self._left = True
        while not (self._ended or self._scheduler.is_here or sys.is_finalizing()):
            self._wait()

    def next_events(self) -> Sequence[Event]:
        """Wait for the events of a pass, and return them; none after the end.

        Raises:
            OffspecError: The error that ended the answer, after its last events.
        """
        events: Sequence[Event] = ()
        while not events and not self._ended:
            events = self._wait()
        if not events and self._error is not None:
            raise self._error
        return events

    def _wait(self) -> Sequence[Event]:
        try:
            if self._arrived.empty():
                self._reading = True
                self._scheduler.wake()
            events, self._ended, self._error = self._arrived.get()
            return events
        finally:
            self._reading = False
