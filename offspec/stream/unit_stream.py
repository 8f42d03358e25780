"""Units of one device in the order of a pass, kept in RAM, read from disk, or both."""

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
    """Stream of units in slots on a device, using a `DiskStream`, a `DeviceStream`, or both.

    Args:
        layouts: Layouts of the units, in order.
        hosted: Indices of the units that are kept in RAM.
        slots: Number of slots of the ring buffer that layers are computed from.
        staging: Number of slots in RAM for units that are read from disk and then copied.
        reader: Reader of the files.
        device: Device that computes with the units. To a device with its own memory they are copied, from
            pinned memory.
        timeline: Timeline of loads, reads and copies.
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
        self._has_own_memory = device.type != "cpu"
        self._hosted: dict[int, Arena] = {}
        self._disk: DiskStream | None = None
        self._stream: DiskStream | DeviceStream | None = None
        self.shape = ReadShape()
        self.read_stats = self.ring_stats = (
            RingStats()
        )  # of the disk ring, and of the ring that layers wait for

    @property
    def bytes_moved(self) -> BytesMoved:
        """Bytes streamed (copied to a device, or on a CPU read from disk), and bytes read from disk."""
        read = self.read_stats.bytes_moved
        return BytesMoved(self.ring_stats.bytes_moved if self._has_own_memory else read, read)

    @property
    def hosted_bytes(self) -> int:
        """Bytes of the units that are kept in RAM."""
        return sum(self.layouts[unit].nbytes for unit in self._wanted)

    @property
    def unpinned_bytes(self) -> int:
        """Bytes of RAM that are copied to a device but could not be pinned."""
        arenas = [*self._hosted.values(), *(self._disk.memory if self._disk is not None else ())]
        return sum(arena.nbytes for arena in arenas if self._has_own_memory and not arena.pinned)

    def load(self, progress: Callable[[int], None]) -> None:
        """Read the units that are kept in RAM, and start streaming.

        progress: called with the bytes of each unit. Raises StreamError, CapacityError, CheckpointError;
        `close` then frees the units loaded so far.
        """
        for unit in self._wanted:
            with self._timeline.span("load", self.layouts[unit].name):
                self._hosted[unit] = read_unit(self.layouts[unit], self._reader, pin=self._has_own_memory)
            progress(self.layouts[unit].nbytes)
        self._stream = self._start()

    def _start(self) -> DiskStream | DeviceStream:
        read = [layout for unit, layout in enumerate(self.layouts) if unit not in self._hosted]
        copied = self._has_own_memory or bool(self._hosted)
        disk = None
        if read:
            self.shape = choose_read_shape(read, self._reader)
            disk = DiskStream(
                read,
                self._staging if copied else self._slots,
                self._reader,
                shape=self.shape,
                pin=self._has_own_memory,
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
        """Return the slot that holds `unit`, uint8 [slot bytes]. Raises StreamError, ClosedError."""
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
