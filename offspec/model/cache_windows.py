"""Keys and values that live in RAM and come to the device a layer at a time, while the layer before computes.

A context that a device has no room for takes two windows there, each as large as the rows of one layer. A
layer computes from its window as it would from memory of its own, so no bit depends on where rows live.
"""

from collections.abc import Mapping
from typing import Any

import torch

from offspec.model.cache_block import ALIGNED, CacheBlock
from offspec.model.cache_layer import Int8CacheLayer, TreeCacheLayer
from offspec.stream.device_stream import PIECE
from offspec_kernels.kv_compact import KVTable


class WindowedLayer(TreeCacheLayer):
    """A layer whose rows live in RAM, and are on the device while it is its turn; see `CacheWindows`.

    home: by name, what is in RAM. Keys of an index have no place there.
    """

    def __init__(
        self, capacity: int, tables: list[KVTable], block: CacheBlock, windows: "CacheWindows"
    ) -> None:
        super().__init__(capacity, tables, block)
        self._windows = windows
        self.home: dict[str, torch.Tensor] = {}

    def _take(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        like = (
            of.new_zeros((*of.shape[:2], 1, of.shape[3]), device="cpu") for of in (key_states, value_states)
        )
        super()._take(*like)
        self.home = super().named_stores
        self._windows.add(self)
        self._windows.enter(self)

    def bind(self, stores: dict[str, torch.Tensor]) -> None:
        """Compute with these from now on."""
        for name, store in stores.items():
            setattr(self, name, store)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.home:
            self._windows.enter(self)
        start = self.filled
        found = super().update(key_states, value_states)
        self._windows.keep(self, start, self.filled)
        return found

    def between(self, start: int, end: int) -> tuple[torch.Tensor, ...]:
        if not self.home:
            return ()
        self._windows.settle()
        views = {name: getattr(self, name) for name in self.home}
        self.bind(self.home)
        found = tuple(rows.to(self._windows.device) for rows in self._read(start, end))
        self.bind(views)
        return found

    @property
    def named_stores(self) -> dict[str, torch.Tensor]:
        return self.home

    def hold(
        self, like: Mapping[str, torch.Tensor], rows: int, dtype: torch.dtype
    ) -> Mapping[str, torch.Tensor]:
        self.reserve(rows)
        self._go_home()
        super().hold({name: store.cpu() for name, store in like.items()}, rows, dtype)
        if not self.home:
            self._windows.add(self)
        self.home = {name: getattr(self, name) for name in like}
        return self.home

    def cut(self, length: int) -> None:
        super().cut(length)
        self._windows.cut(length)

    def reserve(self, capacity: int) -> None:
        if capacity > self.capacity and self.home:
            self._go_home()
            super().reserve(capacity)
            self.home = {name: getattr(self, name) for name in self.home}
            self._windows.enter(self)
        else:
            super().reserve(capacity)

    def _go_home(self) -> None:
        """Compute with what is in RAM, and have it copied again when it is next this layer's turn."""
        self._windows.settle()
        self._windows.forget()
        self.bind(self.home)


class WindowedInt8Layer(WindowedLayer, Int8CacheLayer):
    """The same in 8 bits."""


class CacheWindows:
    """Two windows that the rows of layers pass through, in the order of a pass.

    While a layer computes in one, the committed rows of the next are copied into the other, and those of the
    first while the last computes. Rows that a layer appends are written to its window, and from there to RAM.

    Args:
        nbytes: Bytes of a window.
        device: Where the windows are.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.device = device
        self._memory = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ready: list[torch.cuda.Event | None] = [None, None]
        self._held: list[WindowedLayer | None] = [None, None]
        self._loaded = [0, 0]  # rows that are there of the layer
        self._layers: list[WindowedLayer] = []
        self._now = 0  # the window of the layer whose turn it is
        self._running = False  # whether it is the turn of any
        self._length = 0  # rows that are committed

    def add(self, layer: WindowedLayer) -> None:
        """Take in a layer, the first time that it comes to its turn."""
        self._layers.append(layer)

    def enter(self, layer: WindowedLayer) -> None:
        """Make it the turn of a layer: its rows are in a window, and its stores are views of that."""
        if self._running and self._held[self._now] is layer:
            return
        window = self._held.index(layer) if layer in self._held else 1 - self._now
        self._now, self._running = window, True
        self._bring(window, layer, layer.filled)
        if self._copies is not None:
            event = self._ready[window]
            assert event is not None
            torch.cuda.current_stream(self.device).wait_event(event)
        layer.bind(self._views(window, layer))
        following = self._layers[(self._layers.index(layer) + 1) % len(self._layers)]
        if following is not layer:
            self._bring(1 - window, following, self._length)

    def keep(self, layer: WindowedLayer, start: int, end: int) -> None:
        """Copy rows [start, end) that a layer has appended to RAM."""
        _copy_rows(layer.home, self._views(self._now, layer), start, end)

    def cut(self, length: int) -> None:
        """Keep `length` rows of every layer; the next pass begins."""
        self._length, self._running = length, False
        self._loaded = [min(loaded, length) for loaded in self._loaded]

    def forget(self) -> None:
        """Whatever the windows hold, it is copied again."""
        self._held, self._running = [None, None], False

    def settle(self) -> None:
        """Wait until what layers have appended is in RAM."""
        if self._copies is not None:
            torch.cuda.current_stream(self.device).synchronize()

    def finish(self) -> None:
        """Wait until nothing is copied any more, in either direction, before the memory is given back.

        The rows of the next layer may be on their way to a window, and no pass waits for those that it does
        not come to: they would be written to memory that is another's by then.
        """
        if self._copies is not None:
            self.settle()
            self._copies.synchronize()

    def _bring(self, window: int, layer: WindowedLayer, rows: int) -> None:
        """Copy what is missing of the first `rows` rows of a layer, behind all that is launched by now."""
        start = self._loaded[window] if self._held[window] is layer else 0
        if self._held[window] is layer and start >= rows:
            return
        self._held[window] = None  # until all of it has been launched
        views = self._views(window, layer)
        if self._copies is None:
            _copy_rows(views, layer.home, start, rows)
        else:
            self._copies.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._copies):
                _copy_rows(views, layer.home, start, rows)
                self._ready[window] = self._copies.record_event()
        self._held[window], self._loaded[window] = layer, max(start, rows)

    def _views(self, window: int, layer: WindowedLayer) -> dict[str, torch.Tensor]:
        """The window as stores of a layer, each like its home."""
        views, end = dict[str, torch.Tensor](), 0
        for name, home in layer.home.items():
            start = -(-end // ALIGNED) * ALIGNED
            end = start + home.nbytes
            if end > len(self._memory[window]):  # the layer has grown
                room = sum(store.nbytes + ALIGNED for store in layer.home.values())
                self._memory[window] = self._memory[window].new_empty(room)
                return self._views(window, layer)
            views[name] = self._memory[window][start:end].view(home.dtype).view(home.shape)
        return views


def _copy_rows(to: dict[str, torch.Tensor], source: dict[str, torch.Tensor], start: int, end: int) -> None:
    """Rows [start, end) of each store [1, heads, C, D], in pieces without gaps."""
    for name, store in source.items():
        step = max(PIECE // max(store.shape[3] * store.element_size(), 1), 1)
        for head in range(store.shape[1]):
            for first in range(start, end, step):
                some = slice(first, min(first + step, end))
                to[name][0, head, some].copy_(store[0, head, some], non_blocking=True)
