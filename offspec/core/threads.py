"""Thread utilities: exclusive use of a resource, and event streams for `async` callers."""

import asyncio
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass

from offspec.core.errors import RequestError
from offspec.core.events import Event

STOPPED = "request cancelled while queued"
_POLL_S = 0.05  # interval at which a waiting caller checks for cancellation


class ExclusiveUse:
    """Lock for one caller at a time; other callers wait.

    busy_message: text of the error for a thread that would wait for itself.
    """

    def __init__(self, busy_message: str) -> None:
        self._busy = busy_message
        self._lock = threading.Lock()
        self._holder: int | None = None  # id of the thread that holds the lock

    @property
    def locked(self) -> bool:
        """Whether a thread holds the lock."""
        return self._lock.locked()

    @contextmanager
    def take(self, halt: threading.Event | None = None, *, wait: bool = True) -> Iterator[None]:
        """Hold the lock while the block runs. halt: event that ends the wait.

        Raises RequestError if `halt` is set, if this thread already holds the lock, or if the lock is held
        and `wait` is False.
        """
        if self._holder == threading.get_ident():
            raise RequestError(self._busy)
        while self._lock.locked() and (halt is not None or not wait):
            if halt is None or not wait:
                raise RequestError(self._busy)
            if halt.wait(_POLL_S):
                break
        if halt is not None and halt.is_set():
            raise RequestError(STOPPED)
        with self._lock:  # not `acquire`: Ctrl-C right after that would leave it locked for good
            if halt is not None and halt.is_set():
                raise RequestError(STOPPED)
            self._holder = threading.get_ident()
            try:
                yield
            finally:
                self._holder = None


class StopEvents:
    """Weakly referenced events that cancel running and queued work."""

    def __init__(self) -> None:
        self._events: weakref.WeakSet[threading.Event] = weakref.WeakSet()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._events)

    def new(self) -> threading.Event:
        """Create and return an event that is not set."""
        halt = threading.Event()
        with self._lock:
            self._events.add(halt)
        return halt

    def set(self) -> None:
        """Set all events, from any thread."""
        with self._lock:
            for halt in self._events:
                halt.set()


@dataclass(frozen=True, slots=True)
class _End:
    """End of the stream. error: exception that ended it early, or None."""

    error: BaseException | None = None


async def stream_in_thread(
    start: Callable[[], Generator[Event, None, None]], halt: Callable[[], None]
) -> AsyncGenerator[Event, None]:
    """Yield the events of a generator that runs in its own thread at its own speed.

    If the stream is closed or its task is cancelled, it calls `halt`, which should soon end the generator,
    and waits until the thread has ended. Exceptions of the generator are raised here.
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
        except BaseException as error:  # the caller handles it
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
    """Wait for the end of the stream, even if the task is cancelled meanwhile, as when its loop ends."""
    cancelled: asyncio.CancelledError | None = None
    while True:
        try:
            if isinstance(await queue.get(), _End):
                break
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
