"""Units read when they are asked for, several at once, and kept in slots until others need the room.

Which experts a layer runs is known only when its router has run, so nothing is read ahead of that; instead,
what is likely to be asked for soon is kept. One thread consumes; what an interrupt may strike is told in
`workers`. All that must survive one is `_kept`: a unit is in it while its slot holds all of it, and every
other slot is free or being filled.
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
from offspec.stream.usage import Usage
from offspec.stream.workers import BytesMoved, Filling, RingStats, Round, WorkerDiedError, WorkerPool

_LOADED_AT_ONCE = 32  # units


@dataclass(slots=True)
class StoreStats:
    """Counters since the store was made.

    Args:
        asked: Units that were asked for, each once a call.
        hits: Those of them that were in a slot already.
    """

    asked: int = 0
    hits: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of units asked for that were in a slot; 0 before any was."""
        return self.hits / self.asked if self.asked else 0.0


@dataclass(slots=True)
class _Reads(Round):
    """Fillings by unit. free: slots that hold nothing and are not being filled."""

    free: list[int] = field(default_factory=list)


class ExpertStore:
    """Slots of the size of the largest unit, filled by `shape.depth` reading threads.

    Args:
        layouts: The units, each with a name of its own.
        slots: How many units are kept.
        groups: The group of each unit, whose turns come in order; one of all by default. See `Usage`.
        reader: Reads them.
        arrange: Called with a unit and its slot when it has come; may move what lies there. Default: nothing.
        shape: How many reads at once, and how large.
        pin: Whether a device copies from the slots. Default False.
        timeline: Records reads and waits.

    Raises:
        CapacityError: There is no memory for the slots.
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
        self.stats = StoreStats()
        self._reader, self._shape, self._arrange = reader, shape or ReadShape(), arrange
        self._slot_bytes = max(layout.nbytes for layout in layouts)
        reader.open({extent.file for layout in layouts for extent in layout.extents})
        self._arena = Arena(self._slot_bytes * self.slots, pin=pin)
        self._pin = pin
        self._kept: dict[int, int] = {}  # unit: slot, in the order in which they came
        self.usage = Usage(groups or [0] * len(layouts))
        self._ahead: list[int] = []  # units that are read while nothing else is; the last is the next
        self._pool = WorkerPool(
            self._new_round(), self._shape.depth, "read expert", self._fill_ahead, timeline=timeline
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self._arena.nbytes

    @property
    def unpinned_bytes(self) -> int:
        """Bytes that a device copies from, and could not be pinned."""
        return self.nbytes if self._pin and not self._arena.pinned else 0

    @property
    def load_bytes(self) -> int:
        """Bytes that `load` reads."""
        return sum(layout.nbytes for layout in self.layouts) if self.slots == len(self.layouts) else 0

    @property
    def read_stats(self) -> RingStats:
        """Bytes read, and how long `fetch` waited for them."""
        return self._pool.stats

    @property
    def bytes_moved(self) -> BytesMoved:
        """Bytes read; experts are computed from these slots."""
        read = self.read_stats.bytes_moved
        return BytesMoved(read, read)

    @property
    def kept(self) -> tuple[int, ...]:
        """Units in slots, in the order in which they came."""
        return tuple(self._kept)

    def holds(self, unit: int) -> bool:
        """Whether a unit is in a slot."""
        return unit in self._kept

    def load(self, progress: Callable[[int], None]) -> None:
        """Read all units, where each has a slot; progress(bytes) as it goes. Raises what `fetch` raises."""
        units = range(len(self.layouts)) if self.load_bytes else range(0)
        for start in units[::_LOADED_AT_ONCE]:
            some = units[start : start + _LOADED_AT_ONCE]
            self._begin(list(some)[::-1], set(), iter(()))
            while self._pool.round.fillings:
                self._wait()
            progress(sum(self.layouts[unit].nbytes for unit in some))

    def fetch(
        self, units: Sequence[int], counts: Sequence[int] = (), rows: int = 1
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Give each of the units with its slot, uint8 [slot bytes], which is the caller's until the next.

        Those in slots come first, while the others are being read, which begins at once, and those in the
        order of arrival. More units than slots come in waves.

        Args:
            units: All different, of one group.
            counts: How many of the rows ask for each. Default one.
            rows: Of the pass. Default 1.

        Raises:
            StreamError: A read failed.
            CheckpointError: A checksum is wrong.
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
        self.stats.asked += len(units)
        self.stats.hits += len(here)
        self.usage.note(units, counts or [1] * len(units), rows)
        waiting, pinned = list(due)[::-1], set(units)
        leaving = self.usage.leaving(self._kept, pinned, len(due) - len(self._pool.round.free))
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
        """Have as many of the units read as there are slots for; the last of the list is the next."""
        reads, begun = self._pool.round, False
        while waiting:
            if waiting[-1] not in reads.fillings:  # else ahead of now, or since a call that was broken off
                slot = self._take_slot(pinned, leaving)
                if slot is None:
                    break
                begun |= self._fill(reads, waiting[-1], slot)
            waiting.pop()
        if begun:
            self._pool.ring_for_work()

    def _take_slot(self, pinned: set[int], leaving: Iterator[int]) -> int | None:
        """A free slot, for which a unit may have to leave; None where all are needed."""
        with suppress(IndexError):  # a worker may have taken the last
            return self._pool.round.free.pop()
        unit = next(leaving, None)
        if unit is None:  # in waves, those that were handed out
            unit = next((unit for unit in self._kept if unit not in pinned), None)
        return None if unit is None else self._kept.pop(unit)

    def _fill(self, reads: "_Reads", unit: int, slot: int) -> bool:
        """Have a unit read into a slot, unless it is being read by now."""
        layout = self.layouts[unit]
        jobs = read_jobs(layout, self._reader, self._shape.block, self._buffer)
        filling = Filling(layout.name, slot, jobs)
        if reads.fillings.setdefault(unit, filling) is filling:
            return True
        reads.free.append(slot)
        return False

    def recall(self, shares: Sequence[float]) -> None:
        """Begin with what was learnt of the units' `usage`, and have those read ahead that were used most."""
        self.usage.shares[:] = shares
        self.read_ahead(self.usage.likeliest(self.slots))

    def read_ahead(self, units: Sequence[int]) -> None:
        """Have these read, the first of them first, while nothing is asked for and slots are free."""
        self._ahead = list(units)[::-1]
        self._pool.ring_for_work()

    def _fill_ahead(self, reads: "_Reads") -> bool:
        """Begin with the next of them; called by one worker at a time."""
        while self._ahead:
            unit = self._ahead.pop()
            if unit in reads.fillings or unit in self._kept:  # in this order: it goes from one to the other
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
        """Until one more of the units that are being read is whole."""
        fillings = self._pool.round.fillings
        unit = next(iter(fillings))
        try:
            self._pool.wait_for(lambda: list(fillings.values()), fillings[unit].name)
        except WorkerDiedError as error:
            raise self.layouts[unit].error(f"reading stopped: {error}") from error
        self._keep_whole()

    def _keep_whole(self) -> None:
        reads = self._pool.round
        for unit, filling in list(reads.fillings.items()):
            if not filling.whole:
                continue
            if reads.error is not None:  # one that failed looks whole as well
                raise reads.error
            del reads.fillings[unit]  # first: nothing is arranged twice
            if unit in self._kept:  # read ahead at the moment when it had come
                reads.free.append(filling.slot)
                continue
            self._reader.check_unit(self.layouts[unit], self._buffer(filling.slot))
            if self._arrange is not None:
                self._arrange(unit, self._memory(filling.slot))
            self._kept[unit] = filling.slot

    def _new_round(self) -> _Reads:
        taken = set(self._kept.values())
        return _Reads(free=[slot for slot in range(self.slots) if slot not in taken])

    def _buffer(self, slot: int) -> memoryview:
        return self._arena.buffer[slot * self._slot_bytes : (slot + 1) * self._slot_bytes]

    def _memory(self, slot: int) -> torch.Tensor:
        return self._arena.tensor[slot * self._slot_bytes : (slot + 1) * self._slot_bytes]

    def abandon(self) -> None:
        """After an error or an interrupt: forget what was being read; what is in slots stays."""
        self._pool.stop_round()

    def close(self) -> None:
        """Stop reading. May be called twice."""
        self._ahead = []
        self._pool.close()
        self._kept.clear()
        self._arena.close()
