"""On-demand reading of units, such as experts, into a cache of slots in RAM.

The experts of a layer are known only after its router has run, so they cannot be read ahead of time; instead,
units that are likely to be requested soon stay cached. One thread consumes. `workers` explains how the code
stays consistent under interrupts. The only state that must survive an interrupt is `_kept`: it maps each unit
to its slot while the slot holds the complete unit, and all other slots are free or being filled.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from offspec.core.errors import ClosedError
from offspec.core.trace import OFF, Timeline
from offspec.stream.arena import Arena
from offspec.stream.direct_reader import DirectReader, ReadShape
from offspec.stream.disk_stream import read_jobs
from offspec.stream.layout import UnitLayout
from offspec.stream.unit_usage import UnitUsage
from offspec.stream.workers import BytesMoved, ReadRound, RingStats, SlotRead, WorkerDiedError, WorkerPool

_LOADED_AT_ONCE = 32  # units


@dataclass(slots=True)
class ExpertCacheStats:
    """Counters since the store was created.

    Args:
        requested: Requested units, counted once per call.
        hits: Requested units that were already in a slot.
    """

    requested: int = 0
    hits: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of requested units that were in a slot; 0 before the first request."""
        return self.hits / self.requested if self.requested else 0.0


@dataclass(slots=True)
class _Reads(ReadRound):
    """Reads by unit. free: slots that are empty and not being filled."""

    free: list[int] = field(default_factory=list)


class ExpertStore:
    """Cache of slots of the size of the largest unit, filled by `shape.depth` reader threads.

    Args:
        layouts: Layouts of the units, with unique names.
        slots: Maximum number of cached units.
        reader: Reader of the files.
        groups: Group of each unit; groups are requested in cyclic order. Default: one group. See `UnitUsage`.
        arrange: Called with a unit and its slot when it was read; may rearrange its bytes. Default: None.
        shape: Number and size of concurrent reads.
        pin: Whether a device copies from the slots. Default False.
        timeline: Timeline of reads and waits.

    Raises:
        CapacityError: There is not enough memory for the slots.
    """

    def __init__(
        self,
        layouts: Sequence[UnitLayout],
        slots: int,
        reader: DirectReader,
        *,
        groups: Sequence[int] | None = None,
        arrange: Callable[[int, torch.Tensor], None] | None = None,
        shape: ReadShape | None = None,
        pin: bool = False,
        timeline: Timeline = OFF,
    ) -> None:
        assert layouts and slots >= 1
        self.layouts, self.slots = layouts, min(slots, len(layouts))
        self.stats = ExpertCacheStats()
        self._reader, self._shape, self._arrange = reader, shape or ReadShape(), arrange
        self._slot_bytes = max(layout.nbytes for layout in layouts)
        reader.open({extent.file for layout in layouts for extent in layout.extents})
        self._arena = Arena(self._slot_bytes * self.slots, pin=pin)
        self._pin = pin
        self._kept: dict[int, int] = {}  # slot by unit, in order of arrival
        self.usage = UnitUsage(groups or [0] * len(layouts))
        self._ahead: list[int] = []  # units to prefetch when idle, the next one last
        self._pool = WorkerPool(
            self._new_round(), self._shape.depth, "read expert", self._prefetch_next, timeline=timeline
        )

    @property
    def nbytes(self) -> int:
        """Total bytes of the slots."""
        return self._arena.nbytes

    @property
    def unpinned_bytes(self) -> int:
        """Bytes that a device copies from but that could not be pinned."""
        return self.nbytes if self._pin and not self._arena.pinned else 0

    @property
    def load_bytes(self) -> int:
        """Bytes that `load` reads."""
        return sum(layout.nbytes for layout in self.layouts) if self.slots == len(self.layouts) else 0

    @property
    def read_stats(self) -> RingStats:
        """Bytes read, and seconds that `fetch` waited for them."""
        return self._pool.stats

    @property
    def bytes_moved(self) -> BytesMoved:
        """Bytes read, which are also the streamed bytes: experts are computed from these slots."""
        read = self.read_stats.bytes_moved
        return BytesMoved(read, read)

    @property
    def cached_units(self) -> tuple[int, ...]:
        """Units in slots, in order of arrival."""
        return tuple(self._kept)

    def holds(self, unit: int) -> bool:
        """Return whether a unit is in a slot."""
        return unit in self._kept

    def load(self, progress: Callable[[int], None]) -> None:
        """Read all units if each has a slot. progress: called with bytes read. Raises as `fetch` does."""
        units = range(len(self.layouts)) if self.load_bytes else range(0)
        for start in units[::_LOADED_AT_ONCE]:
            some = units[start : start + _LOADED_AT_ONCE]
            self._begin(list(some)[::-1], set(), iter(()))
            while self._pool.round.reads:
                self._wait()
            progress(sum(self.layouts[unit].nbytes for unit in some))

    def fetch(
        self, units: Sequence[int], counts: Sequence[int] = (), rows: int = 1
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each unit with its slot, uint8 [slot bytes], which is valid until the next iteration.

        Reads of missing units begin at once. Cached units come first, then the others in order of arrival. If
        there are more units than slots, they come in waves.

        Args:
            units: Distinct units of one group.
            counts: Number of rows that use each unit. Default 1 each.
            rows: Number of rows of the pass. Default 1.

        Raises:
            StreamError: A read failed.
            CheckpointError: A checksum does not match.
            ClosedError: The store was closed.
        """
        if self._pool.closed:
            raise ClosedError("the engine was closed while a model was being streamed")
        if self._pool.round.stale:
            self._pool.stop_round()
            self._pool.start_round(self._new_round())
        self._keep_whole()
        here = [unit for unit in units if unit in self._kept]
        due = dict.fromkeys(unit for unit in units if unit not in self._kept)
        self.stats.requested += len(units)
        self.stats.hits += len(here)
        self.usage.note(units, counts or [1] * len(units), rows)
        waiting, pinned = list(due)[::-1], set(units)
        leaving = self.usage.eviction_order(self._kept, pinned, len(due) - len(self._pool.round.free))
        self._begin(waiting, pinned, leaving)
        return self._hand_out(here, due, waiting, pinned, leaving)

    def _hand_out(
        self,
        here: list[int],
        due: dict[int, None],
        waiting: list[int],
        pinned: set[int],
        leaving: Iterator[int],
    ) -> Iterator[tuple[int, torch.Tensor]]:
        while here or due:
            unit = here.pop(0) if here else next((unit for unit in due if unit in self._kept), -1)
            if unit < 0:
                self._wait()
            else:
                due.pop(unit, None)
                yield unit, self._memory(self._kept[unit])
                pinned.discard(unit)
            self._begin(waiting, pinned, leaving)

    def _begin(self, waiting: list[int], pinned: set[int], leaving: Iterator[int]) -> None:
        """Begin reading as many units as there are slots for. waiting: units to read, the next one last."""
        reads, begun = self._pool.round, False
        while waiting:
            if waiting[-1] not in reads.reads:  # else prefetched, or begun by an interrupted call
                slot = self._take_slot(pinned, leaving)
                if slot is None:
                    break
                begun |= self._fill(reads, waiting[-1], slot)
            waiting.pop()
        if begun:
            self._pool.notify_work()

    def _take_slot(self, pinned: set[int], leaving: Iterator[int]) -> int | None:
        """Return a free slot, evicting a unit if necessary; None if all slots are in use."""
        with suppress(IndexError):  # a worker may have taken the last
            return self._pool.round.free.pop()
        unit = next(leaving, None)
        if unit is None:  # in waves, evict a unit that was already handed out
            unit = next((unit for unit in self._kept if unit not in pinned), None)
        return None if unit is None else self._kept.pop(unit)

    def _fill(self, reads: "_Reads", unit: int, slot: int) -> bool:
        """Begin reading a unit into a slot; return False if it is already being read."""
        layout = self.layouts[unit]
        jobs = read_jobs(layout, self._reader, self._shape.block, self._buffer)
        slot_read = SlotRead(layout.name, slot, jobs)
        if reads.reads.setdefault(unit, slot_read) is slot_read:
            return True
        reads.free.append(slot)
        return False

    def restore_usage(self, shares: Sequence[float]) -> None:
        """Restore the `usage` of an earlier run, and prefetch the units that were used most."""
        self.usage.shares[:] = shares
        self.prefetch(self.usage.most_used(self.slots))

    def prefetch(self, units: Sequence[int]) -> None:
        """Read these units in order while no unit is requested and slots are free."""
        self._ahead = list(units)[::-1]
        self._pool.notify_work()

    def _prefetch_next(self, reads: "_Reads") -> bool:
        """Begin the next prefetch; return False if there is none. Called by one worker at a time."""
        while self._ahead:
            unit = self._ahead.pop()
            if unit in reads.reads or unit in self._kept:  # in this order: units move from reads to _kept
                continue
            try:
                slot = reads.free.pop()
            except IndexError:
                self._ahead = []
                break
            if self._fill(reads, unit, slot):
                return True
        return False

    def _wait(self) -> None:
        """Wait until the read of another unit is complete."""
        slot_reads = self._pool.round.reads
        unit = next(iter(slot_reads))
        try:
            self._pool.wait_for(lambda: list(slot_reads.values()), slot_reads[unit].name)
        except WorkerDiedError as error:
            raise self.layouts[unit].error(f"reading stopped: {error}") from error
        self._keep_whole()

    def _keep_whole(self) -> None:
        reads = self._pool.round
        for unit, slot_read in list(reads.reads.items()):
            if not slot_read.is_complete:
                continue
            if reads.error is not None:  # a failed read also looks complete
                raise reads.error
            del reads.reads[unit]  # first, so that no unit is arranged twice
            if unit in self._kept:  # a prefetch began just after the unit had arrived
                reads.free.append(slot_read.slot)
                continue
            self._reader.check_unit(self.layouts[unit], self._buffer(slot_read.slot))
            if self._arrange is not None:
                self._arrange(unit, self._memory(slot_read.slot))
            self._kept[unit] = slot_read.slot

    def _new_round(self) -> _Reads:
        taken = set(self._kept.values())
        return _Reads(free=[slot for slot in range(self.slots) if slot not in taken])

    def _buffer(self, slot: int) -> memoryview:
        return self._arena.buffer[slot * self._slot_bytes : (slot + 1) * self._slot_bytes]

    def _memory(self, slot: int) -> torch.Tensor:
        return self._arena.tensor[slot * self._slot_bytes : (slot + 1) * self._slot_bytes]

    def abandon(self) -> None:
        """Drop unfinished reads after an error or an interrupt; cached units stay."""
        self._pool.stop_round()

    def close(self) -> None:
        """Stop reading. May be called twice."""
        self._ahead = []
        self._pool.close()
        self._kept.clear()
        self._arena.close()
