"""Slots filled in a fixed cyclic order by worker threads, and emptied by one consumer.

Units (layers) are needed in the same order for ever, so the ring wraps from one pass into the next: while
the draft grows a tree, the first layers of the next pass are already being read. A slot belongs to the caller
between `acquire` and `release`. What an interrupt may strike is told in `workers`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offspec.core.trace import OFF, Timeline
from offspec.stream.workers import Filling, Job, RingStats, Round, WorkerPool


@dataclass(slots=True)
class _Cycle(Round):
    """The ring's state between two restarts.

    head: the sequence number that `acquire` hands out next; next_fill: the next to be filled.
    """

    head: int = 0
    next_fill: int = 0


class Ring:
    """Cyclic slots over units, filled by worker threads.

    Sequence number s stands for unit s mod n in slot s mod `slots`. One thread consumes: it acquires units
    in cyclic order and releases each before the next. An error in a worker is raised by `acquire`.

    Args:
        names: One per unit, for the timeline.
        slots: How many.
        jobs_of: Lists what must be done to fill a slot with a unit.
        workers: Threads.
        name: Worker i has the track "<name> <i>" in the timeline.
        waits: The consumer's track, "compute" by default.
        timeline: Records jobs and waits.
    """

    def __init__(
        self,
        names: Sequence[str],
        slots: int,
        jobs_of: Callable[[int], list[Job]],
        *,
        workers: int,
        name: str,
        waits: str = "compute",
        timeline: Timeline = OFF,
    ) -> None:
        assert names and slots >= 1
        self.units, self.slots = len(names), slots
        self._names, self._jobs_of = tuple(names), jobs_of
        self._held = False
        self._pool = WorkerPool(_Cycle(), workers, name, self._fill_next, waits=waits, timeline=timeline)

    @property
    def stats(self) -> RingStats:
        return self._pool.stats

    @property
    def _cycle(self) -> _Cycle:
        return self._pool.round

    def _fill_next(self, cycle: _Cycle) -> bool:
        """Begin with the next unit; called by one worker at a time."""
        if cycle.next_fill >= cycle.head + self.slots:
            return False
        unit = cycle.next_fill % self.units
        filling = Filling(self._names[unit], cycle.next_fill % self.slots, self._jobs_of(unit))
        cycle.fillings[cycle.next_fill] = filling
        cycle.next_fill += 1
        return True

    def acquire(self, unit: int) -> int:
        """The slot that holds `unit`, waiting for it if need be. Raises what a worker raised, ClosedError.

        Asking for another unit than the next in order (after a pass was broken off) restarts the ring.
        """
        assert not self._held, "release a unit before acquiring the next"
        if self._cycle.stale or self._cycle.head % self.units != unit:
            self._pool.stop_round()
            self._pool.start_round(_Cycle(head=unit, next_fill=unit))
        self._pool.wait_for(lambda: [self._cycle.fillings.get(self._cycle.head)], self._names[unit])
        self._held = True
        return self._cycle.head % self.slots

    def release(self) -> None:
        """Give the acquired slot back to be filled again."""
        assert self._held
        # In this order an interrupt between two of these leaves a slot that is still taken, never one that
        # is refilled while it is held.
        self._cycle.fillings.pop(self._cycle.head, None)
        self._cycle.head += 1
        self._held = False
        self._pool.ring_for_work()

    def abandon(self) -> None:
        """After an error or an interrupt: forget what is held and what failed; the ring can be used again.

        It stands still until the next `acquire`, by which time what failed may have been mended.
        """
        self._held = False
        self._pool.stop_round()

    def close(self) -> None:
        """Stop the workers and wait for them. May be called twice."""
        self._pool.close()
