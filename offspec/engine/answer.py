"""Answers to requests: a future with a stream of events, and a stream computed at its reader's pace."""

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

_AHEAD = 2  # max. passes with unread events, if other sequences share the passes


class Answer:
    """A submitted request; see `Engine.submit`. Methods are named as in `concurrent.futures.Future`.

    An answer can be iterated any number of times, also with `async for`; it yields events as they happen.
    `await` returns the result.
    """

    def __init__(
        self, request: Request, progress: bool = False, check_wait: Callable[[], None] = lambda: None
    ) -> None:
        """Create an answer without events.

        Args:
            request: The request.
            progress: Whether to send the events of a running pass, too.
            check_wait: Raises RequestError in the thread that computes the answer.
        """
        self.request, self._check_wait = request, check_wait
        self.gaps = list[float]()  # logit gap of each token, see `VerifyResult`
        self._progress = progress
        self._events = list[Event]()
        self._error: BaseException | None = None
        self._ended = False
        self._changed = threading.Condition()
        self._wakes = list[Callable[[], None]]()

    def done(self) -> bool:
        """Return whether the answer has ended, with a result or an error."""
        return self._ended

    def cancelled(self) -> bool:
        """Return whether the answer was cancelled before it had ended."""
        return self.request.halt.is_set()

    def cancel(self) -> bool:
        """End the answer with the text so far; return False if it has already ended.

        It ends after the current pass, or immediately if no other sequence shares that pass. Unlike a
        future, a cancelled answer has a `result`: the text so far.
        """
        if self._ended:
            return False
        self.request.halt.set()
        return True

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the whole answer.

        Args:
            timeout: Maximum number of seconds to wait. None: no limit.

        Raises:
            OffspecError: See `offspec.core.errors`; the engine stays usable.
            TimeoutError: The answer has not ended; it continues.
        """
        self._wait(timeout)
        return self._result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end, and return the error that `result` would raise; None if there is an answer.

        Args:
            timeout: As in `result`.

        Raises:
            TimeoutError: The answer has not ended; it continues.
        """
        self._wait(timeout)
        return self._error

    def is_due(self, shared: bool) -> bool:
        """Return True: a submitted request takes part in every pass, `shared` with others or not."""
        return True

    def on_progress(self, event: Event) -> None:
        """Receive an event of the running pass from the engine."""
        if self._progress:
            self.put([event])

    def put(
        self, events: Sequence[Event], *, ended: bool = False, error: BaseException | None = None
    ) -> None:
        """Receive events from the engine; `ended` marks the last ones, `error` ends the answer."""
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
    """Events of a request for one reader that sets the pace; a context manager that submits the request.

    A pass begins when the reader has read the events of the previous pass and requests more. If other
    sequences are running, the events of up to two passes are buffered, so the request misses no shared pass.

    Args:
        request: The request.
        scheduler: Computes the answer.
        on_progress: Receives events of the running pass.
    """

    def __init__(self, request: Request, scheduler: Scheduler, on_progress: Callable[[Event], None]) -> None:
        self.request, self.on_progress = request, on_progress
        self.gaps = list[float]()  # logit gap of each token, see `VerifyResult`
        self._scheduler = scheduler
        self._reading = self._cancelled = self._ended = False
        self._error: BaseException | None = None
        self._over = False  # the scheduler has put the last events
        # An interrupt may hit a reader anywhere; events that it loses here are no longer needed.
        self._arrived = queue.SimpleQueue[tuple[Sequence[Event], bool, BaseException | None]]()

    def cancel(self) -> None:
        """End the answer with the text so far."""
        self._cancelled = True

    def cancelled(self) -> bool:
        """Return whether the answer was cancelled or halted."""
        return self._cancelled or self.request.halt.is_set()

    def is_due(self, shared: bool) -> bool:
        """Return whether the request takes part in the next pass.

        Args:
            shared: Whether other sequences take part in that pass.
        """
        return self._reading or (shared and self._arrived.qsize() < _AHEAD)

    def put(
        self, events: Sequence[Event], *, ended: bool = False, error: BaseException | None = None
    ) -> None:
        """Receive the events of a pass; `ended` marks the last ones, `error` ends the answer."""
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

        Closing a generator never waits: the garbage collector may close it in any thread.
        """
        self._cancelled = True
        self._scheduler.wake()
        if kind not in (None, GeneratorExit):
            while not (self._over or self._scheduler.in_scheduler_thread):
                self._arrived.get()

    def next_events(self) -> Sequence[Event]:
        """Wait for the events of a pass and return them; return an empty sequence after the end.

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

    def with_mismatches(self, result: Result) -> Result:
        """Decode the request again with one token per pass; return the result with its mismatches."""
        request = replace(self.request, sources=(), trees=False, fresh=True)
        with StreamedAnswer(request, self._scheduler, self.on_progress) as alone:
            while events := alone.next_events():
                last = events[-1]
        assert isinstance(last, Finished)
        return replace(result, mismatches=find_mismatches(result, self.gaps, last.result))


def find_mismatches(result: Result, gaps: Sequence[float], alone: Result) -> tuple[Mismatch, ...] | None:
    """Return the first mismatch between an answer and the same answer decoded with one token per pass.

    Later differences are not compared, because the texts have diverged.

    Args:
        result: The answer.
        gaps: Logit gap of each of its tokens, see `VerifyResult`.
        alone: The answer with one token per pass.

    Returns:
        No mismatches if both are equal; None if `alone` was halted before any difference was found.
    """
    tokens, others = result.token_ids, alone.token_ids
    for place, (token, other) in enumerate(zip(tokens, others, strict=False)):
        if token != other:
            return (Mismatch(place, token, other, gaps[place]),)
    if alone.finish_reason == "halted":
        return None
    if (len(tokens), result.finish_reason) == (len(others), alone.finish_reason):
        return ()
    place = min(len(tokens), len(others))  # one of them ended there, or they ended for different reasons
    emitted, unspeculated = (ids[place] if place < len(ids) else None for ids in (tokens, others))
    return (Mismatch(place, emitted, unspeculated, 0.0),)
