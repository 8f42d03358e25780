"""Gives every layer its weights just before it runs: resident ones once, the others from the stream."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from offspec.core.trace import OFF, Span, Timeline
from offspec.model.binding import Binder
from offspec.model.unpacking import Scratch
from offspec.stream.arena import Arena
from offspec.stream.device_stream import DeviceStream
from offspec.stream.direct_reader import DirectReader, ReadShape
from offspec.stream.disk_stream import DiskStream, read_unit
from offspec.stream.layout import UnitLayout
from offspec.stream.read_tuning import choose_read_shape
from offspec.stream.ring import RingStats
from offspec_planners.placement import Placement, Tier


class LayerFeeder:
    """Binds layer i on `enter(i)` and takes its weights away again on `leave(i)`.

    binders: one per layer, on the device that computes it. blocks: the units of a head that streams, which
    follow the last layer. With a device that has memory of its own, or with layers in the host tier, a second
    ring of copies lies between the disk's ring and the layers. scratches: by device, what packed weights are
    unpacked in, a module at a time; without any, layers that stay are unpacked as they are loaded, and none
    may stream packed.
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
    ) -> None:
        self._binders, self._placement, self._scratches = binders, placement, dict(scratches or {})
        self._reader, self._device, self._timeline = reader, device, timeline
        streamed = [layer for layer, tier in enumerate(placement.tiers) if tier.streams]
        self._order = {layer: unit for unit, layer in enumerate(streamed)}
        self._units = [binders[layer].layout for layer in streamed] + list(blocks)
        self._tiers = [placement.tiers[layer] for layer in streamed] + [placement.head] * len(blocks)
        self._stream: DiskStream | DeviceStream | None = None
        self._hosted: dict[int, Arena] = {}
        self._span: Span | None = None
        self.shape = ReadShape()
        self.read_stats = self.ring_stats = RingStats()  # of what reads, and of what the layers wait for

    @property
    def resident(self) -> tuple[int, ...]:
        """Layers that have their weights on the device at all times, and may run outside their turn."""
        return tuple(self._placement.resident)

    def load(self, progress: Callable[[int, int], None]) -> None:
        """Read what stays, and start streaming the rest; progress(bytes done, bytes in all) as it goes.

        Raises StreamError, CapacityError; `close` frees what there is by then.
        """
        layers = [layer for layer, tier in enumerate(self._placement.tiers) if not tier.streams]
        hosted = [unit for unit, tier in enumerate(self._tiers) if tier is Tier.HOST]
        total = sum(self._binders[layer].layout.nbytes for layer in layers)
        total += sum(self._units[unit].nbytes for unit in hosted)
        done = 0
        if self._scratches:
            for binder in self._binders:
                binder.install(self._scratches[binder.device])
        for layer in layers:
            binder = self._binders[layer]
            # The parameters are views that keep this memory alive; where they are copies, it is freed.
            with self._timeline.span("load", binder.layout.name):
                memory = read_unit(binder.layout, self._reader).tensor.to(binder.device)
                if self._scratches:
                    binder.attach(memory)
                else:
                    binder.bind(binder.realise(memory))
            done += binder.layout.nbytes
            progress(done, total)
        for unit in hosted:
            with self._timeline.span("load", self._units[unit].name):
                self._hosted[unit] = read_unit(self._units[unit], self._reader, pin=self._apart)
            done += self._units[unit].nbytes
            progress(done, total)
        if self._units:
            self._stream = self._start()

    @property
    def _apart(self) -> bool:
        """Whether the device has memory of its own."""
        return self._device.type != "cpu"

    def _start(self) -> DiskStream | DeviceStream:
        read = [layout for layout, tier in zip(self._units, self._tiers, strict=True) if tier is Tier.DISK]
        copied = self._apart or bool(self._hosted)
        disk = None
        if read:
            self.shape = choose_read_shape(read, self._reader)
            slots = self._placement.staging if copied else self._placement.slots
            disk = DiskStream(
                read,
                slots,
                self._reader,
                shape=self.shape,
                pin=self._apart,
                waits="copy 0" if copied else "compute",
                timeline=self._timeline,
            )
            self.read_stats = self.ring_stats = disk.ring.stats
        if not copied:
            assert disk is not None
            return disk
        try:
            copies = DeviceStream(
                self._units, self._hosted, disk, self._placement.slots, self._device, self._timeline
            )
        except BaseException:
            if disk is not None:
                disk.close()
            raise
        self.ring_stats = copies.ring.stats
        return copies

    def enter(self, layer: int) -> None:
        """Have layer's weights in place. Raises StreamError, ClosedError."""
        unit = self._order.get(layer)
        if unit is not None and self._stream is not None:
            memory = self._stream.acquire(unit)
            try:
                self._binders[layer].attach(memory)
            except BaseException:
                self._stream.release()
                raise
        self._span = self._timeline.span("compute", self._binders[layer].layout.name).__enter__()

    def leave(self, layer: int) -> None:
        if self._span is not None:
            self._settle()
            self._span.__exit__(None, None, None)
            self._span = None
        if self._stream is not None and layer in self._order:
            self._binders[layer].unbind()
            self._stream.release()

    def _settle(self) -> None:
        """While a timeline is kept, let the device finish, so that a span is the work and not its launch."""
        if self._timeline.on and self._apart:
            torch.cuda.synchronize(self._device)

    @contextmanager
    def head_block(self, index: int) -> Iterator[torch.Tensor]:
        """The slot that holds block `index` of a head that streams. Raises StreamError, ClosedError."""
        assert self._stream is not None
        unit = len(self._order) + index
        memory = self._stream.acquire(unit)
        try:
            with self._timeline.span("compute", self._units[unit].name):
                yield memory
                self._settle()
        finally:
            self._stream.release()

    def recover(self) -> None:
        """After a pass was broken off: make the stream usable for the next."""
        self._span = None
        for scratch in self._scratches.values():
            scratch.taken = 0
        if self._stream is not None:
            self._stream.abandon()

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        for arena in self._hosted.values():
            arena.close()
        self._hosted.clear()
        for binder in self._binders:
            binder.close()
