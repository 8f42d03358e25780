"""Simulation of the rings of `offspec.stream`, event by event, for units that are read, copied and computed.

It models the rings only, without threads and clocks. Three rules determine the order of events. A worker
fills one unit after another. It begins a unit once the slot for it was released. The consumer computes with
a unit once it has arrived, in order, and then releases it.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unit:
    """A layer or a block of the head. Seconds to read it from disk, to copy it and to compute with it.

    copy is 0 if units are computed from the slots they are read into; both are 0 if the unit is resident.
    """

    compute: float
    read: float = 0.0
    copy: float = 0.0

    @property
    def streams(self) -> bool:
        return self.read > 0 or self.copy > 0


class _Ring:
    """Fills slots one at a time, each once its last holder has released it."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._filled = 0.0
        self._released: list[float] = []

    def fill(self, seconds: float, ready: float = 0.0) -> float:
        """Return when the next unit is complete, if it takes `seconds` and may begin at `ready`."""
        place = len(self._released)
        free = self._released[place - self._slots] if place >= self._slots else 0.0
        self._filled = max(self._filled, free, ready) + seconds
        return self._filled

    def release(self, at: float) -> None:
        """Release the slot of the unit that was filled last."""
        self._released.append(at)


def seconds_per_pass(
    units: Sequence[Unit], draft: float, around: float, slots: int, staging: int, passes: int = 12
) -> float:
    """Return the seconds of a pass in steady state: the mean of the later half of the passes.

    units: in the order in which a pass needs them. draft: seconds before each pass; around: seconds of a
        pass in addition to its units. slots: number of slots that units are computed from; staging: slots
        before those, 0 if nothing is copied.
    """
    ring, stages = _Ring(slots), _Ring(staging)
    now, ends = 0.0, list[float]()
    for _ in range(passes):
        now += draft + around
        for unit in units:
            if unit.copy:
                read = stages.fill(unit.read) if unit.read else 0.0
                come = ring.fill(unit.copy, ready=read)
                if unit.read:
                    stages.release(come)
            elif unit.read:
                come = ring.fill(unit.read)
            now = max(now, come) + unit.compute if unit.streams else now + unit.compute
            if unit.streams:
                ring.release(now)
        ends.append(now)
    half = passes // 2
    return (ends[-1] - ends[-1 - half]) / half
