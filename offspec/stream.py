"""The ring that feeds a pass: slots filled in a fixed cyclic order by worker threads.

Units (layers) are needed in the same order for ever, so the ring wraps from one pass into the next: while
the draft grows a tree, the first layers of the next pass are already being read. A slot is filled job by
job (a job is one block of a file, or one copy to the device), several workers at a time, and belongs to
the caller between `acquire` and `release`.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from offspec.errors import ClosedError
from offspec.store.arena import PAGE, Arena
from offspec.store.layout import Extent, UnitLayout
from offspec.store.reader import BLOCK, DirectReader

Job = Callable[[int], int]  # (slot) -> bytes moved


@dataclass(slots=True)
class _Filling:
    """A unit on its way into a slot: jobs still to start, and jobs not yet finished."""

    waiting: list[Job]
    running: int = 0


@dataclass(slots=True)
class RingStats:
    """Counters since the ring was made; `wait_seconds` is how long the consumer stood waiting."""

    bytes_moved: int = 0
    wait_seconds: float = 0.0


@dataclass(slots=True)
class _State:
    head: int = 0  # the sequence number that `acquire` hands out next
    next_fill: int = 0  # the next sequence number to be filled
    held: int | None = None
    fillings: dict[int, _Filling] = field(default_factory=dict)
    error: BaseException | None = None
    paused: bool = False
    stale: bool = False  # a restart was begun and not finished
    closed: bool = False


class Ring:
    """Cyclic slots over `units`; `jobs_of(unit)` lists what must be done to fill a slot with it.

    Sequence number s stands for unit s mod n in slot s mod `slots`. One thread consumes: it acquires units
    in cyclic order and releases each before the next. An error in a worker surfaces in `acquire`.
    """

    def __init__(
        self, units: int, slots: int, jobs_of: Callable[[int], list[Job]], *, workers: int, name: str
    ) -> None:
        assert units >= 1 and slots >= 1
        self.units, self.slots = units, slots
        self.stats = RingStats()
        self._jobs_of = jobs_of
        self._state = _State()
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, name=f"offspec-{name}-{i}", daemon=True)
            for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def acquire(self, unit: int) -> int:
        """The slot that holds `unit`, waiting for it if need be. Raises what a worker raised, ClosedError.

        Asking for another unit than the next in order (after a pass was broken off) starts the ring anew.
        """
        with self._changed:
            state = self._state
            assert state.held is None, "release a unit before acquiring the next"
            if state.paused:
                state.paused = False
                self._changed.notify_all()
            if state.stale or state.head % self.units != unit:
                self._restart(unit)
            while True:
                # A failed job leaves its unit looking filled, so the error is looked for first.
                if state.error is not None:
                    raise state.error
                if self._ready(state.head):
                    break
                if state.closed:
                    raise ClosedError("the engine was closed while a model was being streamed")
                asked = time.perf_counter()
                self._changed.wait()
                self.stats.wait_seconds += time.perf_counter() - asked
            state.held = state.head
            return state.head % self.slots

    def release(self) -> None:
        """Give the acquired slot back to be filled anew."""
        with self._changed:
            state = self._state
            assert state.held is not None
            state.fillings.pop(state.held, None)
            state.head, state.held = state.held + 1, None
            self._changed.notify_all()

    def abandon(self) -> None:
        """After an error or an interrupt: forget what is held and what failed; the ring can be used again.

        It stands still until the next `acquire`, by which time what failed may have been mended.
        """
        with self._changed:
            self._state.held = None
            self._restart(0)
            self._state.error = None
            self._state.paused = True

    def close(self) -> None:
        """Stop the workers and wait for them. May be called twice."""
        with self._changed:
            self._state.closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _ready(self, sequence: int) -> bool:
        filling = self._state.fillings.get(sequence)
        return filling is not None and not filling.waiting and not filling.running

    def _restart(self, unit: int) -> None:
        state = self._state
        state.stale = (
            True  # an interrupt while waiting here must not let a half-filled slot pass for a whole one
        )
        for filling in state.fillings.values():
            filling.waiting.clear()
        while any(filling.running for filling in state.fillings.values()):
            self._changed.wait()
        state.fillings.clear()
        state.head = state.next_fill = unit
        state.stale = False
        self._changed.notify_all()

    def _take(self) -> tuple[_Filling, Job, int] | None:
        """The next job in order, or None when the ring closes. Called with the lock held."""
        state = self._state
        while not state.closed:
            if state.error is None and not state.paused:
                for sequence in sorted(state.fillings):
                    filling = state.fillings[sequence]
                    if filling.waiting:
                        filling.running += 1
                        return filling, filling.waiting.pop(0), sequence % self.slots
                if state.next_fill < state.head + self.slots:
                    jobs = self._jobs_of(state.next_fill % self.units)
                    state.fillings[state.next_fill] = _Filling(jobs)
                    state.next_fill += 1
                    continue
            self._changed.wait()
        return None

    def _work(self) -> None:
        while True:
            with self._changed:
                taken = self._take()
            if taken is None:
                return
            filling, job, slot = taken
            moved, error = 0, None
            try:
                moved = job(slot)
            except BaseException as caught:  # every failure must reach the caller, none may end the thread
                error = caught
            with self._changed:
                filling.running -= 1
                self.stats.bytes_moved += moved
                if error is not None and self._state.error is None:
                    self._state.error = error
                self._changed.notify_all()


class DiskStream:
    """Units read from their files into page-aligned host slots.

    slot_bytes is the largest unit; `memory[slot]` the Arena to compute from, or to copy to a device from.
    """

    def __init__(
        self,
        layouts: Sequence[UnitLayout],
        slots: int,
        reader: DirectReader,
        *,
        readers: int = 2,
        pin: bool = False,
    ) -> None:
        self.layouts = layouts
        self.slot_bytes = max(layout.nbytes for layout in layouts)
        self.memory = [Arena(self.slot_bytes, pin=pin) for _ in range(slots)]
        self._reader = reader
        self.ring = Ring(len(layouts), slots, self._jobs, workers=readers, name="read")

    def _jobs(self, unit: int) -> list[Job]:
        return [
            lambda slot, extent=extent, at=at: self._read(slot, extent, at)  # type: ignore[misc]
            for extent in self.layouts[unit].extents
            for at in range(0, extent.length, BLOCK)
        ]

    def _read(self, slot: int, extent: Extent, at: int) -> int:
        length = min(BLOCK, extent.length - at)
        target = self.memory[slot].buffer[extent.start + at : extent.start + at + length]
        return self._reader.read_into(
            extent.file, extent.offset + at, target, min(length, extent.needed - at)
        )

    @property
    def bytes_read(self) -> int:
        return self.ring.stats.bytes_moved

    def acquire(self, unit: int) -> torch.Tensor:
        """The slot that holds `unit`, uint8 [slot bytes], the caller's until `release`."""
        return self.memory[self.ring.acquire(unit)].tensor

    def release(self) -> None:
        self.ring.release()

    def abandon(self) -> None:
        self.ring.abandon()

    def close(self) -> None:
        self.ring.close()
        for arena in self.memory:
            arena.close()


class DeviceStream:
    """Units copied on to device slots, one ring feeding another: disk reads, copies and compute overlap.

    The copies run on a stream of their own. A device slot is refilled only when the kernels that read it
    have run, which an event recorded at `release` tells; the host slot is given back once its copy is done.
    """

    def __init__(self, source: DiskStream, slots: int, device: torch.device) -> None:
        self.source = source
        self.memory = [torch.empty(source.slot_bytes, dtype=torch.uint8, device=device) for _ in range(slots)]
        self._device = device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free: list[torch.cuda.Event | None] = [None] * slots
        self._slot = 0
        self.ring = Ring(
            len(source.layouts),
            slots,
            lambda unit: [lambda slot: self._copy(unit, slot)],
            workers=1,
            name="copy",
        )

    @property
    def bytes_read(self) -> int:
        return self.source.bytes_read

    def _copy(self, unit: int, slot: int) -> int:
        memory = self.source.acquire(unit)
        try:
            size = self.source.layouts[unit].nbytes
            if self._copies is None:
                self.memory[slot][:size].copy_(memory[:size])
                return size
            with torch.cuda.stream(self._copies):
                free = self._free[slot]
                if free is not None:
                    self._copies.wait_event(free)
                self.memory[slot][:size].copy_(memory[:size], non_blocking=True)
            self._copies.synchronize()
            return size
        finally:
            self.source.release()

    def acquire(self, unit: int) -> torch.Tensor:
        self._slot = self.ring.acquire(unit)
        return self.memory[self._slot]

    def release(self) -> None:
        if self._copies is not None:
            self._free[self._slot] = torch.cuda.current_stream(self._device).record_event()
        self.ring.release()

    def abandon(self) -> None:
        self.ring.abandon()
        self.source.abandon()

    def close(self) -> None:
        self.ring.close()
        self.source.close()


def read_unit(layout: UnitLayout, reader: DirectReader, *, pin: bool = False) -> Arena:
    """Read a whole unit once, into memory of its own: a resident layer."""
    arena = Arena(layout.nbytes, pin=pin)
    for extent in layout.extents:
        target = arena.buffer[extent.start : extent.start + extent.length]
        reader.read_into(extent.file, extent.offset, target, extent.needed)
    return arena


assert BLOCK % PAGE == 0
