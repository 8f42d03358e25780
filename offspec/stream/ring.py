"""Ring buffer whose slots are filled in cyclic order by worker threads and emptied by one consumer.

Units (layers) are always needed in the same order, so the ring wraps from one pass into the next: while the
draft grows a tree, the first layers of the next pass are already being read. A slot belongs to the caller
between `acquire` and `release`. `workers` explains how the code stays consistent under interrupts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offspec.core.trace import OFF, Timeline
from offspec.stream.workers import Job, ReadRound, RingStats, SlotRead, WorkerPool


@dataclass(slots=True)
class _Cycle(ReadRound):
    """State of the ring between two restarts.

    head: sequence number that `acquire` returns next. next_fill: sequence number that is filled next.
    """

    head: int = 0
    next_fill: int = 0


class Ring:
    """Ring buffer of slots for n units, filled by worker threads.

    Sequence number s is unit s mod n in slot s mod `slots`. One thread consumes: it acquires units in cyclic
    order and releases each one before the next. Errors of workers are raised by `acquire`.

    Args:
        names: Names of the units, for the timeline.
        slots: Number of slots.
        jobs_of: Returns the jobs that fill a slot with a unit.
        workers: Number of threads.
        name: Worker i has the track "<name> <i>" in the timeline.
        waits: Track of the consumer, "compute" by default.
        timeline: Timeline of jobs and waits.
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
        """Begin to read the next unit; return False if no slot is free. Called by one worker at a time."""
        if cycle.next_fill >= cycle.head + self.slots:
            return False
        unit = cycle.next_fill % self.units
        slot_read = SlotRead(self._names[unit], cycle.next_fill % self.slots, self._jobs_of(unit))
        cycle.reads[cycle.next_fill] = slot_read
        cycle.next_fill += 1
        return True

    def acquire(self, unit: int) -> int:
        """Return the slot that holds `unit`, waiting for it if necessary.

        Acquiring a unit out of order (after a pass was cancelled) restarts the ring. Raises ClosedError, and
        errors of the workers.
        """
        assert not self._held, "release a unit before acquiring the next"
        if self._cycle.stale or self._cycle.head % self.units != unit:
            self._pool.stop_round()
            self._pool.start_round(_Cycle(head=unit, next_fill=unit))
        self._pool.wait_for(lambda: [self._cycle.reads.get(self._cycle.head)], self._names[unit])
        self._held = True
        return self._cycle.head % self.slots

    def release(self) -> None:
        """Release the acquired slot, so that it can be refilled."""
        assert self._held
        # In this order, an interrupt between two statements leaves a slot that is still in use, never one
        # that is refilled while it is held.
        self._cycle.reads.pop(self._cycle.head, None)
        self._cycle.head += 1
        self._held = False
        self._pool.notify_work()

    def abandon(self) -> None:
        """Drop the held slot and stop the round after an error or an interrupt.

        The ring stays usable. It is idle until the next `acquire`; by then the cause of the error may be
        fixed.
        """
        self._held = False
        self._pool.stop_round()

    def close(self) -> None:
        """Stop the workers and wait for them. May be called twice."""
        self._pool.close()
