"""Supply of each layer's weights just before it runs: resident layers once, the others from the stream."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from offspec.core.trace import OFF, Span, Timeline
from offspec.model.binding import Binder
from offspec.model.routed_experts import AnyExpertStore
from offspec.model.unpacking import Scratch
from offspec.stream.direct_reader import DirectReader
from offspec.stream.disk_stream import read_unit
from offspec.stream.layout import UnitLayout
from offspec.stream.unit_stream import UnitStream
from offspec.stream.workers import BytesMoved, RingStats
from offspec_planners.placement import Placement, Tier


class LayerFeeder:
    """Binds the weights of layer i on `enter(i)` and unbinds them on `leave(i)`.

    Args:
        binders: One per layer, with the layer's compute device; each device has its own stream.
        blocks: Units of a streamed head, which follow the last layer on `device`.
        placement: Tier of each layer and of the head.
        reader: Reader of the weight files.
        device: Device of the model outside its layers.
        timeline: Trace of loads and layers.
        scratches: By device, workspace to unpack one module's packed weights at a time. Without it, resident
            layers are unpacked at load, and no layer may stream packed.
        store: Store of on-demand experts.
        on_demand_layers: Layers with on-demand experts.
    """

    def __init__(
        self,
        binders: list[Binder],
        blocks: Sequence[UnitLayout],
        placement: Placement,
        reader: DirectReader,
        device: torch.device,
        timeline: Timeline = OFF,
        scratches: Mapping[torch.device, Scratch] | None = None,
        store: AnyExpertStore | None = None,
        on_demand_layers: Collection[int] = (),
    ) -> None:
        self._binders, self._placement, self._scratches = binders, placement, dict(scratches or {})
        self._reader, self._device, self._timeline = reader, device, timeline
        self._store, self._on_demand_layers = store, on_demand_layers
        self._units: dict[int, tuple[torch.device, int]] = {}  # by layer, then by head block
        layouts: dict[torch.device, list[tuple[UnitLayout, Tier]]] = {}
        streamed = [
            (binder.device, binder.layout, tier)
            for binder, tier in zip(binders, placement.tiers, strict=True)
        ]
        streamed += [(device, block, placement.head) for block in blocks]
        for index, (place, layout, tier) in enumerate(streamed):
            if tier.streams:
                found = layouts.setdefault(place, [])
                self._units[index] = place, len(found)
                found.append((layout, tier))
        self._streams = {
            place: UnitStream(
                [layout for layout, _ in found],
                [unit for unit, (_, tier) in enumerate(found) if tier is Tier.HOST],
                placement.slots,
                placement.staging,
                reader,
                place,
                timeline,
            )
            for place, found in layouts.items()
        }
        self._sources = [*([] if store is None else [store]), *self._streams.values()]
        self._span: Span | None = None

    @property
    def resident(self) -> tuple[int, ...]:
        """Layers whose weights are always on `device`, so that they may run at any time."""
        return tuple(
            layer
            for layer in self._placement.resident
            if self._binders[layer].device == self._device and layer not in self._on_demand_layers
        )

    @property
    def bytes_moved(self) -> BytesMoved:
        """Total bytes streamed and bytes read, on all devices."""
        moved = [source.bytes_moved for source in self._sources]
        return BytesMoved(sum(each.streamed for each in moved), sum(each.read for each in moved))

    @property
    def ring_stats(self) -> RingStats:
        """Live statistics of the only ring buffer, or the current totals if there are several devices."""
        every = [stream.ring_stats for stream in self._streams.values()]
        if len(every) == 1:
            return every[0]
        return RingStats(sum(each.bytes_moved for each in every), sum(each.wait_seconds for each in every))

    @property
    def unpinned_bytes(self) -> int:
        """Bytes of RAM used as a source of copies to a device that could not be pinned."""
        return sum(source.unpinned_bytes for source in self._sources)

    def load(self, progress: Callable[[int, int], None]) -> None:
        """Read the resident weights and start streaming the rest, calling progress(bytes done, total bytes).

        Raises StreamError or CapacityError. Call `close` afterwards to free what has been loaded.
        """
        staying = [self._binders[i] for i, tier in enumerate(self._placement.tiers) if not tier.streams]
        total = sum(binder.layout.nbytes for binder in staying)
        total += sum(stream.hosted_bytes for stream in self._streams.values())
        total += self._store.load_bytes if self._store is not None else 0
        done = 0

        def add_progress(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            progress(done, total)

        if self._scratches:
            for binder in self._binders:
                binder.install(self._scratches[binder.device])
        for binder in staying:
            # Parameters that are views keep this memory alive; if all are copies, it is freed.
            with self._timeline.span("load", binder.layout.name):
                memory = binder.layout.copy_to_device(
                    read_unit(binder.layout, self._reader).tensor, binder.device
                )
                if self._scratches:
                    binder.attach(memory)
                else:
                    binder.bind(binder.materialize(memory))
            add_progress(binder.layout.nbytes)
        for source in self._sources:
            source.load(add_progress)

    def enter(self, layer: int) -> None:
        """Bind a layer's weights, waiting for them if needed. Raises StreamError or ClosedError."""
        if layer in self._units:
            memory = self._acquire(layer)
            try:
                self._binders[layer].attach(memory)
            except BaseException:
                self._release(layer)
                raise
        self._span = self._timeline.span("compute", self._binders[layer].layout.name).__enter__()

    def leave(self, layer: int) -> None:
        if self._span is not None:
            self._settle(self._binders[layer].device)
            self._span.__exit__(None, None, None)
            self._span = None
        if layer in self._units and self._streams:
            self._binders[layer].unbind()
            self._release(layer)

    def _acquire(self, index: int) -> torch.Tensor:
        place, unit = self._units[index]
        return self._streams[place].acquire(unit)

    def _release(self, index: int) -> None:
        self._streams[self._units[index][0]].release()

    def _settle(self, device: torch.device) -> None:
        """Wait for a traced layer to finish, so that its span covers the work and not only the launch."""
        if self._timeline.on and device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # without waiting for copies of later layers

    @contextmanager
    def head_block(self, index: int) -> Iterator[torch.Tensor]:
        """Provide the slot with block `index` of a streamed head. Raises StreamError or ClosedError."""
        place = len(self._binders) + index
        memory = self._acquire(place)
        try:
            device, unit = self._units[place]
            with self._timeline.span("compute", self._streams[device].layouts[unit].name):
                yield memory
                self._settle(device)
        finally:
            self._release(place)

    def recover(self) -> None:
        """Make the stream usable again after a pass was cancelled."""
        self._span = None
        for scratch in self._scratches.values():
            scratch.taken = 0
        for source in self._sources:
            source.abandon()

    def close(self) -> None:
        for source in reversed(self._sources):  # closing the store waits for copies, which may have failed
            source.close()
        for binder in self._binders:
            binder.close()
