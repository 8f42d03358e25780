"""Answers: a future with a stream of events, and one that is computed as it is read."""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Self

from offspec.core.events import Event, Finished, Mismatch, Result
from offspec.engine.request import Request
from offspec.engine.scheduler import Scheduler
from offspec_planners.units import format_seconds

_AHEAD = 2  # passes whose events may wait for a reader, where other sequences share them


class Answer:
    """A request that was submitted; see `Engine.submit`. Methods are named as in `concurrent.futures.Future`.

    It can be iterated, also with `async for`, any number of times: events come as they happen. `await` gives
    the result.
    """

    def __init__(
        self, request: Request, progress: bool = False, check_wait: Callable[[], None] = lambda: None
    ) -> None:
        """Events of a request.

        Args:
            request: The request.
            progress: Whether events of passes under way are sent, too.
            check_wait: Raises RequestError in the thread that computes the answer.
        """
        self.request, self._check_wait = request, check_wait
        self.gaps = list[float]()  # of each token, see `Walk`
        self._progress = progress
        self._events = list[Event]()
        self._error: BaseException | None = None
        self._ended = False
        self._changed = threading.Condition()
        self._wakes = list[Callable[[], None]]()

    def done(self) -> bool:
        """Return whether it has ended, well or not."""
        return self._ended

    def cancelled(self) -> bool:
        """Return whether it was asked to end before it had ended."""
        return self.request.halt.is_set()

    def cancel(self) -> bool:
        """End it with the text so far, after the pass under way; at once where it is by itself.

        Unlike a future's, its `result` is then what came of it. Return False where it has ended already.
        """
        if self._ended:
            return False
        self.request.halt.set()
        return True

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the whole answer.

        Args:
            timeout: Seconds to wait at most. None: as long as it takes.

        Raises:
            OffspecError: See `offspec.core.errors`; the engine can be used on.
            TimeoutError: It goes on.
        """
        self._wait(timeout)
        return self._result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end, and return the error that `result` would raise; None if there is an answer.

        Args:
            timeout: As in `result`.

        Raises:
            TimeoutError: It goes on.
        """
        self._wait(timeout)
        return self._error

    def is_due(self, shared: bool) -> bool:
        """Return whether it takes part in the next pass, which others `shared` or not: always."""
        return True

    def progressed(self, event: Event) -> None:
        """From the engine: how far the pass under way is."""
        if self._progress:
            self.put([event])

    def put(
        self, events: Sequence[Event], *, ended: bool = False, error: BaseException | None = None
    ) -> None:
        """From the engine: more events, whether they are the last, and why there are no more."""
        with self._changed:
            self._events += events
            self._error, self._ended = error, ended or error is not None
            self._changed.notify_all()
            wakes = [*self._wakes]
        for wake in wakes:
            wake()

    def __iter__(self) -> Iterator[Event]:
        read = 0
        self._check_wait()
        while True:
            with self._changed:
                while not self._ended and len(self._events) == read:
                    self._changed.wait()
                fresh, ended = self._events[read:], self._ended
            yield from fresh
            read += len(fresh)
            if ended:
                break
        self._check()

    async def __aiter__(self) -> AsyncIterator[Event]:
        loop, arrived, read = asyncio.get_running_loop(), asyncio.Event(), 0

        def wake() -> None:
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(arrived.set)

        with self._changed:
            self._wakes.append(wake)
        try:
            while True:
                arrived.clear()
                fresh, ended = self._events[read:], self._ended
                for event in fresh:
                    yield event
                read += len(fresh)
                if ended and read == len(self._events):
                    break
                if not fresh:
                    await arrived.wait()
        finally:
            with self._changed:
                self._wakes.remove(wake)
        self._check()

    def __await__(self) -> Generator[object, None, Result]:
        return self._last().__await__()

    async def _last(self) -> Result:
        async for _ in self:
            pass
        return self._result()

    def _wait(self, timeout: float | None) -> None:
        if not self._ended:
            self._check_wait()
        with self._changed:
            if not self._changed.wait_for(lambda: self._ended, timeout):
                raise TimeoutError(f"the answer has not ended within {format_seconds(timeout or 0)}")

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _result(self) -> Result:
        self._check()
        last = self._events[-1]
        assert isinstance(last, Finished)
        return last.result


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
