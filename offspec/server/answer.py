"""One answer on its way from the engine's thread to a client."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from types import TracebackType
from typing import Self

from offspec.core.events import Event, PassProgress, PassStats, Prefill, TreeSeen
from offspec.server.exchange import Ask, Delta, EngineEvent
from offspec.server.faults import Fault

_MOST_UNREAD = 4096  # events that a client may be behind before its answer is broken off


class Answer:
    """The events of one answer, to be iterated; a context manager, after which it is abandoned.

    An abandoned answer is halted once its prompt is computed, so that a retry finds it in the cache, or
    earlier by `on_leave`. prompt_tokens: of the prompt. Iteration raises Fault if the answer fails.
    """

    def __init__(self, ask: Ask, ids: list[int], on_leave: Callable[["Answer"], None]) -> None:
        self.ask, self.ids = ask, ids
        self._on_leave = on_leave
        self.prompt_tokens = len(ids)
        self.halt = threading.Event()
        self.abandoned = self.prompt_computed = False
        self.begun = asyncio.Event()  # whether it waits no longer
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._unread = deque[Delta | Fault | None]()  # None: the end

    @property
    def with_logprobs(self) -> bool:
        """Whether log-probabilities are asked for."""
        return self.ask.params.logprobs is not None

    def put(self, item: Delta | Fault | None) -> None:
        """From the engine's thread: one more event, why there are no more, or their end."""
        if len(self._unread) >= _MOST_UNREAD and not self.halt.is_set():
            self.halt.set()
            item = Fault("timeout", "the answer was broken off: it was read too slowly")
        self._unread.append(item)
        self._set(self._arrived)

    def begin(self) -> None:
        """From the engine's thread: its turn has come."""
        self._set(self.begun)

    def end_pass(self) -> None:
        """From the engine's thread: a pass has ended, the first of which computes the prompt."""
        self.prompt_computed = True
        if self.abandoned:
            self.halt.set()

    def _set(self, event: asyncio.Event) -> None:
        try:
            self._loop.call_soon_threadsafe(event.set)
        except RuntimeError:  # the loop was closed
            self.halt.set()

    def tell(self, event: Event) -> None:
        """From the engine's thread: how far the answer is, for who asks for that."""
        if self.ask.trees and isinstance(event, Prefill | PassProgress | TreeSeen | PassStats):
            self.put(EngineEvent(event))

    def put_all(self, items: Iterable[Delta]) -> None:
        """From the engine's thread: several events."""
        for item in items:
            self.put(item)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while True:
            while self._unread:
                item = self._unread.popleft()
                if item is None:
                    return
                if isinstance(item, Fault):
                    raise item
                yield item
            self._arrived.clear()
            if not self._unread:
                await self._arrived.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandoned = True
        self._on_leave(self)
