"""An answer that others are computed beside: a future, and a stream of events."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import suppress

from offspec.core.events import Event, Finished, Result
from offspec.engine.request import Request
from offspec_planners.units import format_seconds


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
