"""The units of one device in the order of a pass: kept in RAM, read from disk, or some of each."""

from collections.abc import Callable, Sequence

import torch

from offspec.core.trace import OFF, Timeline
from offspec.stream.arena import Arena
from offspec.stream.device_stream import DeviceStream
from offspec.stream.direct_reader import DirectReader, ReadShape
from offspec.stream.disk_stream import DiskStream, read_unit
from offspec.stream.layout import UnitLayout
from offspec.stream.read_tuning import choose_read_shape
from offspec.stream.workers import BytesMoved, RingStats


class UnitStream:
    """Hands out units in slots on a device, as `DiskStream` and `DeviceStream` do.

    Args:
        layouts: The units in order.
        hosted: Which of them are kept in RAM, by number.
        slots: Of the ring that units are computed from.
        staging: Slots in RAM that units from disk pass through where they are copied on.
        reader: Reads them.
        device: Where they are computed with; one with memory of its own has them copied, from pinned memory.
        timeline: Records loads, reads and copies.
    """

    def __init__(
        self,
        layouts: Sequence[UnitLayout],
        hosted: Sequence[int],
        slots: int,
        staging: int,
        reader: DirectReader,
        device: torch.device,
        timeline: Timeline = OFF,
    ) -> None:
        self.layouts = list(layouts)
        self._wanted, self._slots, self._staging = list(hosted), slots, staging
        self._reader, self._device, self._timeline = reader, device, timeline
        self._apart = device.type != "cpu"
        self._hosted: dict[int, Arena] = {}
        self._disk: DiskStream | None = None
        self._stream: DiskStream | DeviceStream | None = None
        self.shape = ReadShape()
        self.read_stats = self.ring_stats = RingStats()  # of what reads, and of what the layers wait for

    @property
    def bytes_moved(self) -> BytesMoved:
        """Bytes copied to a device with memory of its own, or read from disk if there is none; bytes read."""
        read = self.read_stats.bytes_moved
        return BytesMoved(self.ring_stats.bytes_moved if self._apart else read, read)

    @property
    def hosted_bytes(self) -> int:
        """Bytes of the units that are kept in RAM."""
        return sum(self.layouts[unit].nbytes for unit in self._wanted)

    @property
    def unpinned_bytes(self) -> int:
        """Bytes of RAM that are copied to a device from, and could not be pinned."""
        arenas = [*self._hosted.values(), *(self._disk.memory if self._disk is not None else ())]
        return sum(arena.nbytes for arena in arenas if self._apart and not arena.pinned)

    def load(self, progress: Callable[[int], None]) -> None:
        """Read what is kept in RAM, and start streaming; progress(bytes) after each.

        Raises StreamError, CapacityError, CheckpointError; `close` frees what there is by then.
        """
        for unit in self._wanted:
            with self._timeline.span("load", self.layouts[unit].name):
                self._hosted[unit] = read_unit(self.layouts[unit], self._reader, pin=self._apart)
            progress(self.layouts[unit].nbytes)
        self._stream = self._start()

    def _start(self) -> DiskStream | DeviceStream:
        read = [layout for unit, layout in enumerate(self.layouts) if unit not in self._hosted]
        copied = self._apart or bool(self._hosted)
        disk = None
        if read:
            self.shape = choose_read_shape(read, self._reader)
            disk = DiskStream(
                read,
                self._staging if copied else self._slots,
                self._reader,
                shape=self.shape,
                pin=self._apart,
                waits="copy 0" if copied else "compute",
                timeline=self._timeline,
            )
            self._disk = disk
            self.read_stats = self.ring_stats = disk.ring.stats
        if not copied:
            assert disk is not None
            return disk
        try:
            copies = DeviceStream(self.layouts, self._hosted, disk, self._slots, self._device, self._timeline)
        except BaseException:
            if disk is not None:
                disk.close()
            raise
        self.ring_stats = copies.ring.stats
        return copies

    def acquire(self, unit: int) -> torch.Tensor:
        """The slot that holds `unit`, uint8 [slot bytes]. Raises StreamError, ClosedError."""
        assert self._stream is not None
        return self._stream.acquire(unit)

    def release(self) -> None:
        if self._stream is not None:
            self._stream.release()

    def abandon(self) -> None:
        if self._stream is not None:
            self._stream.abandon()

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = self._disk = None
        for arena in self._hosted.values():
            arena.close()
        self._hosted.clear()
