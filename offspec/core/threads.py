"""Who waits for whom: callers that take turns, and streams of events for `async` callers."""

import asyncio
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass

from offspec.core.errors import RequestError
from offspec.core.events import Event

STOPPED = "this was stopped before its turn came"
_LOOK_S = 0.05  # how often a caller that waits looks whether it still should


class ExclusiveUse:
    """One caller at a time; others wait. busy: what a thread is told that would wait for itself."""

    def __init__(self, busy: str) -> None:
        self._busy = busy
        self._lock = threading.Lock()
        self._holder: int | None = None  # the thread that has the turn

    @property
    def taken(self) -> bool:
        """Whether a thread has its turn."""
        return self._lock.locked()

    @contextmanager
    def take(self, halt: threading.Event | None = None, *, wait: bool = True) -> Iterator[None]:
        """A turn, for as long as the block runs. halt: gives up waiting once it is set.

        Raises RequestError where it was halted, would wait for its own thread, or may not `wait` and must.
        """
        if self._holder == threading.get_ident():
            raise RequestError(self._busy)
        while self._lock.locked() and (halt is not None or not wait):
            if halt is None or not wait:
                raise RequestError(self._busy)
            if halt.wait(_LOOK_S):
                break
        if halt is not None and halt.is_set():
            raise RequestError(STOPPED)
        with self._lock:  # and not `acquire`: Ctrl-C just behind that would leave it taken for good
            if halt is not None and halt.is_set():
                raise RequestError(STOPPED)
            self._holder = threading.get_ident()
            try:
                yield
            finally:
                self._holder = None


class Halts:
    """Events that end what runs, or waits to, as long as something holds them."""

    def __init__(self) -> None:
        self._events: weakref.WeakSet[threading.Event] = weakref.WeakSet()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._events)

    def new(self) -> threading.Event:
        """One more, which is not set."""
        halt = threading.Event()
        with self._lock:
            self._events.add(halt)
        return halt

    def set(self) -> None:
        """Set all there are, from any thread."""
        with self._lock:
            for halt in self._events:
                halt.set()


@dataclass(frozen=True, slots=True)
class _End:
    """Nothing more comes. error: why, where it should have."""

    error: BaseException | None = None


async def in_thread(
    start: Callable[[], Generator[Event, None, None]], halt: Callable[[], None]
) -> AsyncGenerator[Event, None]:
    """The events of a generator that runs in a thread of its own, as fast as it goes.

    When it is closed or its task is cancelled, it calls `halt`, upon which the generator should soon end, and
    waits until the thread has. Raises what the generator raises.
    """
    loop = asyncio.get_running_loop()
    queue = asyncio.Queue[Event | _End]()

    def put(item: Event | _End) -> None:
        with suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(queue.put_nowait, item)

    def work() -> None:
        try:
            with closing(start()) as events:
                for event in events:
                    put(event)
        except BaseException as error:  # it is for the caller to judge
            put(_End(error))
        else:
            put(_End())

    thread = threading.Thread(target=work, name="offspec async", daemon=True)
    thread.start()
    item: Event | _End | None = None
    try:
        while not isinstance(item := await queue.get(), _End):
            yield item
    finally:
        if not isinstance(item, _End):
            halt()
            await _end(queue)
        thread.join()
    if item.error is not None:
        raise item.error


async def _end(queue: asyncio.Queue[Event | _End]) -> None:
    """Wait for the end. A task that is cancelled meanwhile, as when its loop ends, waits all the same."""
    cancelled: asyncio.CancelledError | None = None
    while True:
        try:
            if isinstance(await queue.get(), _End):
                break
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
