"""The answer of one request on its way to its client."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from types import TracebackType
from typing import Self

from offspec.core.events import Event, PassProgress, PassStats, Prefill, TreeSeen
from offspec.server.exchange import Ask, Delta, EngineEvent
from offspec.server.faults import Fault

_MOST_UNREAD = 4096  # deltas that a client may be behind before its answer is broken off


class DeltaStream:
    """The deltas of one answer, to be iterated; a context manager, after which it is abandoned.

    An abandoned answer is halted once its prompt is computed, so that a retry finds it in the cache, or
    earlier by `on_leave`. prompt_tokens: of the prompt. Iteration raises Fault if the answer fails.
    """

    def __init__(self, ask: Ask, ids: list[int], on_leave: Callable[["DeltaStream"], None]) -> None:
        self.ask, self.ids = ask, ids
        self._on_leave = on_leave
        self.prompt_tokens = len(ids)
        self.halt = threading.Event()
        self.abandoned = self.prompt_computed = False
        self.begun = asyncio.Event()  # whether it waits no longer
        self._arrived = asyncio.Event()
        self._unread = deque[Delta | Fault | None]()  # None: the end

    @property
    def with_logprobs(self) -> bool:
        """Whether log-probabilities are asked for."""
        return self.ask.params.logprobs is not None

    def put(self, item: Delta | Fault | None) -> None:
        """Add a delta, the fault that ends the answer, or its end."""
        if len(self._unread) >= _MOST_UNREAD and not self.halt.is_set():
            self.halt.set()
            item = Fault("timeout", "the answer was broken off: it was read too slowly")
        self._unread.append(item)
        self._arrived.set()

    def put_all(self, items: Iterable[Delta]) -> None:
        """Add several deltas."""
        for item in items:
            self.put(item)

    def note(self, event: Event) -> None:
        """Take an event of the engine: for display, where the request wants it; and the end of a pass."""
        if self.ask.trees and isinstance(event, Prefill | PassProgress | TreeSeen | PassStats):
            self.put(EngineEvent(event))
        if isinstance(event, PassStats):
            self.prompt_computed = True
            if self.abandoned:
                self.halt.set()

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
            await self._arrived.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandoned = True
        self._on_leave(self)
