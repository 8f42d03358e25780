"""KV cache offload: rows stay in RAM and are copied to the device one layer ahead of the computation.

A context too large for the device's memory needs only two buffers ("windows") there, each as large as the
rows of one layer. A layer computes from its window exactly as from its own memory, so results do not depend
on where rows are stored.
"""

from collections.abc import Mapping
from typing import Any

import torch

from offspec.model.cache_block import ALIGNED, CacheBlock
from offspec.model.cache_layer import Int8CacheLayer, TreeCacheLayer
from offspec.stream.device_stream import PIECE
from offspec_kernels.kv_compact import KVTable


class OffloadedLayer(TreeCacheLayer):
    """Layer whose rows are stored in RAM and copied to the device while the layer runs; see `CacheOffload`.

    `home` has the stores in RAM by name. Index keys are not supported.
    """

    def __init__(
        self, capacity: int, tables: list[KVTable], block: CacheBlock, windows: "CacheOffload"
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
        """Use `stores` for subsequent computation."""
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

    def read_rows(self, start: int, end: int) -> tuple[torch.Tensor, ...]:
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

    def allocate_like(
        self, like: Mapping[str, torch.Tensor], rows: int, dtype: torch.dtype
    ) -> Mapping[str, torch.Tensor]:
        self.reserve(rows)
        self._go_home()
        super().allocate_like({name: store.cpu() for name, store in like.items()}, rows, dtype)
        if not self.home:
            self._windows.add(self)
        self.home = {name: getattr(self, name) for name in like}
        return self.home

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self._windows.truncate(length)

    def reserve(self, capacity: int) -> None:
        if capacity > self.capacity and self.home:
            self._go_home()
            super().reserve(capacity)
            self.home = {name: getattr(self, name) for name in self.home}
            self._windows.enter(self)
        else:
            super().reserve(capacity)

    def _go_home(self) -> None:
        """Use the stores in RAM, and copy them to a window again when the layer runs next."""
        self._windows.settle()
        self._windows.forget()
        self.bind(self.home)


class OffloadedInt8Layer(OffloadedLayer, Int8CacheLayer):
    """Offloaded layer with keys and values in 8 bits."""


class CacheOffload:
    """Two device buffers ("windows") through which the rows of all layers pass, in the order of a pass.

    While a layer computes from one window, the committed rows of the next layer are copied into the other.
    After the last layer comes the first. Rows that a layer appends are written to its window, and copied from
    there to RAM.

    Args:
        nbytes: Bytes of a window.
        device: Device of the windows.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.device = device
        self._memory = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ready: list[torch.cuda.Event | None] = [None, None]
        self._held: list[OffloadedLayer | None] = [None, None]
        self._loaded = [0, 0]  # rows of the layer in each window
        self._layers: list[OffloadedLayer] = []
        self._now = 0  # window of the current layer
        self._running = False  # whether there is a current layer
        self._length = 0  # committed rows

    def add(self, layer: OffloadedLayer) -> None:
        """Register a layer when it first runs."""
        self._layers.append(layer)

    def enter(self, layer: OffloadedLayer) -> None:
        """Make `layer` current: load its rows into a window and bind views of it as the layer's stores."""
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

    def keep(self, layer: OffloadedLayer, start: int, end: int) -> None:
        """Copy a layer's appended rows [start, end) from its window to RAM."""
        _copy_rows(layer.home, self._views(self._now, layer), start, end)

    def truncate(self, length: int) -> None:
        """Keep `length` rows of every layer, and end the current pass."""
        self._length, self._running = length, False
        self._loaded = [min(loaded, length) for loaded in self._loaded]

    def forget(self) -> None:
        """Discard the contents of the windows, so that rows are copied again."""
        self._held, self._running = [None, None], False

    def settle(self) -> None:
        """Wait until all appended rows are in RAM."""
        if self._copies is not None:
            torch.cuda.current_stream(self.device).synchronize()

    def finish(self) -> None:
        """Wait for all copies in both directions to end, before the memory is freed.

        The copy of the next layer's rows to a window may still be running if the pass ended early. It would
        write to memory that may already be reused.
        """
        if self._copies is not None:
            self.settle()
            self._copies.synchronize()

    def _bring(self, window: int, layer: OffloadedLayer, rows: int) -> None:
        """Copy the missing rows of a layer's first `rows` rows, after all work launched so far."""
        start = self._loaded[window] if self._held[window] is layer else 0
        if self._held[window] is layer and start >= rows:
            return
        self._held[window] = None  # until the whole copy has been launched
        views = self._views(window, layer)
        if self._copies is None:
            _copy_rows(views, layer.home, start, rows)
        else:
            self._copies.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._copies):
                _copy_rows(views, layer.home, start, rows)
                self._ready[window] = self._copies.record_event()
        self._held[window], self._loaded[window] = layer, max(start, rows)

    def _views(self, window: int, layer: OffloadedLayer) -> dict[str, torch.Tensor]:
        """Return views of a window as a layer's stores, with the shapes and dtypes of those in RAM."""
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
    """Copy rows [start, end) of each store [1, heads, C, D] in contiguous pieces."""
    for name, store in source.items():
        step = max(PIECE // max(store.shape[3] * store.element_size(), 1), 1)
        for head in range(store.shape[1]):
            for first in range(start, end, step):
                some = slice(first, min(first + step, end))
                to[name][0, head, some].copy_(store[0, head, some], non_blocking=True)
