"""What the rings of `offspec.stream` do, event by event, for units that are read, copied and computed with.

A stand-in for the rings and nothing else: no threads, no clocks. The order of events follows from three
rules. A worker fills one unit after another; it begins a unit when the slot that it goes to was released;
and the consumer computes with a unit when it has come, in order, and releases it then.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unit:
    """A layer or a block of the head. Seconds of reading it from disk, copying it, computing with it.

    copy is 0 where units are computed from the slots they are read into; both are 0 where the unit stays.
    """

    compute: float
    read: float = 0.0
    copy: float = 0.0

    @property
    def streams(self) -> bool:
        return self.read > 0 or self.copy > 0


class _Ring:
    """Fills slots one at a time, each when its last holder has released it."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._filled = 0.0
        self._released: list[float] = []

    def fill(self, seconds: float, ready: float = 0.0) -> float:
        """When the next unit is whole, if it takes so many seconds and may not begin before `ready`."""
        place = len(self._released)
        free = self._released[place - self._slots] if place >= self._slots else 0.0
        self._filled = max(self._filled, free, ready) + seconds
        return self._filled

    def release(self, at: float) -> None:
        """Give back the slot of the unit that was filled last."""
        self._released.append(at)


def seconds_per_pass(
    units: Sequence[Unit], draft: float, around: float, slots: int, staging: int, passes: int = 12
) -> float:
    """Seconds of a pass in steady state: the mean of the later half of so many.

    units in the order in which a pass needs them. draft: before each pass; around: of a pass besides its
    units. slots: that units are computed from; staging: those before them, 0 where nothing is copied.
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
