"""Gives every layer its weights just before it runs: resident ones once, the others from the stream."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from offspec.core.trace import OFF, Span, Timeline
from offspec.model.binding import Binder
from offspec.model.expert_parts import AnyExpertStore
from offspec.model.unpacking import Scratch
from offspec.stream.direct_reader import DirectReader
from offspec.stream.disk_stream import read_unit
from offspec.stream.layout import UnitLayout
from offspec.stream.unit_stream import UnitStream
from offspec.stream.workers import BytesMoved, RingStats
from offspec_planners.placement import Placement, Tier


class LayerFeeder:
    """Binds layer i on `enter(i)` and takes its weights away again on `leave(i)`.

    binders: one per layer, on the device that computes it; each device has a stream of its own. blocks: the
    units of a head that streams, which follow the last layer on `device`. scratches: by device, what packed
    weights are unpacked in, a module at a time; without any, layers that stay are unpacked as they are
    loaded, and none may stream packed. store: of experts that are read when they are asked for; needing: the
    layers that have such.
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
        needing: Collection[int] = (),
    ) -> None:
        self._binders, self._placement, self._scratches = binders, placement, dict(scratches or {})
        self._reader, self._device, self._timeline = reader, device, timeline
        self._store, self._needing = store, needing
        self._units: dict[int, tuple[torch.device, int]] = {}  # of layers, and of blocks behind them
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
        """Layers that have their weights on `device` at all times, and may run outside their turn."""
        return tuple(
            layer
            for layer in self._placement.resident
            if self._binders[layer].device == self._device and layer not in self._needing
        )

    @property
    def bytes_moved(self) -> BytesMoved:
        """Bytes streamed and bytes read, on all devices."""
        moved = [source.bytes_moved for source in self._sources]
        return BytesMoved(sum(each.streamed for each in moved), sum(each.read for each in moved))

    @property
    def ring_stats(self) -> RingStats:
        """Of what the layers wait for: that of one device itself, of several the sums until now."""
        every = [stream.ring_stats for stream in self._streams.values()]
        if len(every) == 1:
            return every[0]
        return RingStats(sum(each.bytes_moved for each in every), sum(each.wait_seconds for each in every))

    @property
    def unpinned_bytes(self) -> int:
        """Bytes of RAM that are copied to a device from, and could not be pinned."""
        return sum(source.unpinned_bytes for source in self._sources)

    def load(self, progress: Callable[[int, int], None]) -> None:
        """Read what stays, and start streaming the rest; progress(bytes done, bytes in all) as it goes.

        Raises StreamError, CapacityError; `close` frees what there is by then.
        """
        staying = [self._binders[i] for i, tier in enumerate(self._placement.tiers) if not tier.streams]
        total = sum(binder.layout.nbytes for binder in staying)
        total += sum(stream.hosted_bytes for stream in self._streams.values())
        total += self._store.load_bytes if self._store is not None else 0
        done = 0

        def tell(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            progress(done, total)

        if self._scratches:
            for binder in self._binders:
                binder.install(self._scratches[binder.device])
        for binder in staying:
            # The parameters are views that keep this memory alive; where they are copies, it is freed.
            with self._timeline.span("load", binder.layout.name):
                memory = binder.layout.put_on(read_unit(binder.layout, self._reader).tensor, binder.device)
                if self._scratches:
                    binder.attach(memory)
                else:
                    binder.bind(binder.realise(memory))
            tell(binder.layout.nbytes)
        for source in self._sources:
            source.load(tell)

    def enter(self, layer: int) -> None:
        """Have layer's weights in place. Raises StreamError, ClosedError."""
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
        """While a timeline is kept, let the layer finish, so that a span is the work and not its launch."""
        if self._timeline.on and device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # and not copies of later layers

    @contextmanager
    def head_block(self, index: int) -> Iterator[torch.Tensor]:
        """The slot that holds block `index` of a head that streams. Raises StreamError, ClosedError."""
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
        """After a pass was broken off: make the stream usable for the next."""
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
