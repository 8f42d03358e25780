"""Copies of units to a device with its own memory, from RAM and from the ring buffer of disk reads."""

from collections.abc import Sequence

import torch

from offspec.core.errors import OffspecError
from offspec.core.trace import OFF, Timeline
from offspec.stream.arena import Arena
from offspec.stream.disk_stream import DiskStream
from offspec.stream.layout import UnitLayout
from offspec.stream.ring import Ring
from offspec.stream.workers import WorkerDiedError

# Bytes of one copy. A transfer of a draft step waits for at most two pieces, about a millisecond, instead of
# a whole layer.
PIECE = 16 << 20


class DeviceStream:
    """Device ring buffer that is fed by the disk ring buffer, so that reads, copies and compute overlap.

    Copies run on their own CUDA stream in pieces, two of them in flight, so that other copies can run in
    between. A device slot is refilled only after the kernels that read it have run, as shown by an event
    recorded at `release`. A host slot of the disk ring is released as soon as its copy is done.

    Args:
        layouts: Layouts of the units, in order.
        hosted: Arenas of the units that stay in RAM; the other units come from `disk`, in order.
        disk: Stream of the units that are read from disk, or None.
        slots: Number of device slots.
        device: Device of the slots.
        timeline: Timeline of the copies.
    """

    def __init__(
        self,
        layouts: Sequence[UnitLayout],
        hosted: dict[int, Arena],
        disk: DiskStream | None,
        slots: int,
        device: torch.device,
        timeline: Timeline = OFF,
    ) -> None:
        self.layouts = layouts
        self._hosted, self._disk, self._device = hosted, disk, device
        read = [unit for unit in range(len(layouts)) if unit not in hosted]
        self._place = {unit: place for place, unit in enumerate(read)}
        assert (disk is not None) == bool(read)
        slot_bytes = max(layout.nbytes_on(device) for layout in layouts)
        self.memory = [torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(slots)]
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._in_flight: list[torch.cuda.Event] = []
        if self._copies is not None:
            # Blocking events: a spinning thread would take a core from reading and computing threads.
            self._in_flight = [torch.cuda.Event(blocking=True) for _ in range(2)]
            # Kernels may still be reading memory that was freed and is reused for the slots.
            self._copies.wait_stream(torch.cuda.current_stream(device))
        self._free: list[torch.cuda.Event | None] = [None] * slots
        self._slot = 0
        self.ring = Ring(
            [layout.name for layout in layouts],
            slots,
            lambda unit: [lambda slot: self._fill(unit, slot)],
            workers=1,
            name="copy",
            timeline=timeline,
        )

    def _fill(self, unit: int, slot: int) -> int:
        arena = self._hosted.get(unit)
        if arena is not None:
            return self._copy(unit, arena.tensor, slot)
        assert self._disk is not None
        memory = self._disk.acquire(self._place[unit])
        try:
            return self._copy(unit, memory, slot)
        finally:
            self._disk.release()

    def _copy(self, unit: int, memory: torch.Tensor, slot: int) -> int:
        size = self.layouts[unit].nbytes
        try:
            if self._copies is None:
                self._move(unit, memory, slot)
                return size
            with torch.cuda.stream(self._copies):
                free = self._free[slot]
                if free is not None:
                    self._copies.wait_event(free)
                self._move(unit, memory, slot)
            for event in self._in_flight:
                event.synchronize()
            return size
        except OffspecError:
            raise
        except Exception as error:
            raise self.layouts[unit].error(f"copying {self.layouts[unit].name} failed: {error}") from error

    def _move(self, unit: int, memory: torch.Tensor, slot: int) -> None:
        number = 0
        for move in self.layouts[unit].moves_to(self._device):
            source = memory[move.source : move.source + move.length]
            target = self.memory[slot][move.target : move.target + move.length]
            if self._copies is None:
                target.copy_(source)
                continue
            for into, piece in zip(target.split(PIECE), source.split(PIECE), strict=True):
                self._send(into, piece, number)
                number += 1

    def _send(self, into: torch.Tensor, piece: torch.Tensor, number: int) -> None:
        """Start a copy once the second-to-last piece has arrived."""
        event = self._in_flight[number % 2]
        event.synchronize()
        into.copy_(piece, non_blocking=True)
        event.record(self._copies)

    def acquire(self, unit: int) -> torch.Tensor:
        """Return the slot that holds `unit`, uint8 [slot bytes]. Raises StreamError, ClosedError."""
        try:
            self._slot = self.ring.acquire(unit)
        except WorkerDiedError as error:
            raise self.layouts[unit].error(f"copying stopped: {error}") from error
        return self.memory[self._slot]

    def release(self) -> None:
        self._note_readers()
        self.ring.release()

    def _note_readers(self) -> None:
        if self._copies is not None:
            self._free[self._slot] = torch.cuda.current_stream(self._device).record_event()

    def abandon(self) -> None:
        try:
            # Kernels of the cancelled pass may still read the held slot. Their results are dropped, but
            # weights must not change during a kernel.
            self._note_readers()
        finally:
            try:
                self.ring.abandon()
            finally:
                if self._disk is not None:
                    self._disk.abandon()

    def close(self) -> None:
        self.ring.close()
        if self._disk is not None:
            self._disk.close()
        self.memory.clear()
