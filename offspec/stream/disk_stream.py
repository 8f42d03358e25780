"""Disk reads of units into page-aligned memory, the lowest memory tier."""

from collections.abc import Callable, Sequence

import torch

from offspec.core.trace import OFF, Timeline
from offspec.stream.arena import Arena
from offspec.stream.direct_reader import DirectReader, ReadShape
from offspec.stream.layout import Extent, UnitLayout
from offspec.stream.ring import Ring
from offspec.stream.workers import Job, WorkerDiedError


class DiskStream:
    """Ring buffer of host slots of the size of the largest unit, filled by `shape.depth` reader threads."""

    def __init__(
        self,
        layouts: Sequence[UnitLayout],
        slots: int,
        reader: DirectReader,
        *,
        shape: ReadShape | None = None,
        pin: bool = False,
        waits: str = "compute",
        timeline: Timeline = OFF,
    ) -> None:
        self.layouts = layouts
        self.shape = shape or ReadShape()
        self.memory: list[Arena] = []
        self._reader = reader
        self._ring: Ring | None = None
        slot_bytes = max(layout.nbytes for layout in layouts)
        reader.open({extent.file for layout in layouts for extent in layout.extents})
        try:
            self.memory += (Arena(slot_bytes, pin=pin) for _ in range(slots))
            self._ring = Ring(
                [layout.name for layout in layouts],
                slots,
                self._jobs,
                workers=self.shape.depth,
                name="read",
                waits=waits,
                timeline=timeline,
            )
        except BaseException:
            self.close()
            raise

    @property
    def ring(self) -> Ring:
        assert self._ring is not None
        return self._ring

    def _jobs(self, unit: int) -> list[Job]:
        layout = self.layouts[unit]
        return read_jobs(layout, self._reader, self.shape.block, lambda slot: self.memory[slot].buffer)

    def acquire(self, unit: int) -> torch.Tensor:
        """Return the slot that holds `unit`, uint8 [slot bytes], valid until `release`.

        Raises StreamError, ClosedError, or CheckpointError if its checksum does not match.
        """
        try:
            arena = self.memory[self.ring.acquire(unit)]
        except WorkerDiedError as error:
            raise self.layouts[unit].error(f"reading stopped: {error}") from error
        self._reader.check_unit(self.layouts[unit], arena.buffer)
        return arena.tensor

    def release(self) -> None:
        self.ring.release()

    def abandon(self) -> None:
        self.ring.abandon()

    def close(self) -> None:
        if self._ring is not None:
            self._ring.close()
        for arena in self.memory:
            arena.close()
        self.memory.clear()


def read_jobs(
    layout: UnitLayout, reader: DirectReader, block: int, slot_memory: Callable[[int], memoryview]
) -> list[Job]:
    """Return the jobs that read a unit into a slot's memory, in blocks of at most `block` bytes."""

    def job(extent: Extent, at: int, length: int) -> Job:
        def read(slot: int) -> int:
            start = extent.start + at
            target = slot_memory(slot)[start : start + length]
            return reader.read_into(extent.file, extent.offset + at, target, min(length, extent.needed - at))

        return read

    return [
        job(extent, at, min(block, extent.length - at))
        for extent in layout.extents
        for at in range(0, extent.length, block)
    ]


def read_unit(layout: UnitLayout, reader: DirectReader, *, pin: bool = False) -> Arena:
    """Read a unit into its own arena, to keep it in RAM.

    Raises StreamError, CapacityError, or CheckpointError if its checksum does not match.
    """
    arena = Arena(layout.nbytes, pin=pin)
    try:
        for extent in layout.extents:
            target = arena.buffer[extent.start : extent.start + extent.length]
            reader.read_into(extent.file, extent.offset, target, extent.needed)
        reader.check_unit(layout, arena.buffer)
    except BaseException:
        arena.close()
        raise
    return arena
