"""States that a text can be taken up again from: a state cannot be cut, as keys and values can."""

from collections.abc import Mapping
from dataclasses import dataclass

from offspec.model.recurrence.state import Committed

MOST, OF_DRAFT = 4, 1  # are kept of a target, and of a draft, whose text is soon read again
SPACING = 256  # committed positions without one, at most, until the number is reached
Place = tuple[int, int]  # a layer, and which of its recurrences


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All states of a model behind `length` positions."""

    length: int
    states: Mapping[Place, Committed]

    def copy(self) -> "Snapshot":
        """The same with states of its own."""
        return Snapshot(self.length, {place: found.copy() for place, found in self.states.items()})


class Snapshots:
    """Snapshots of one text, `kept` in the order of their lengths. most: are kept at most."""

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self.kept: list[Snapshot] = []

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of all of them, ascending."""
        return tuple(kept.length for kept in self.kept)

    @property
    def newest(self) -> int:
        """Positions of the longest; 0 where there is none."""
        return self.kept[-1].length if self.kept else 0

    def add(self, snapshot: Snapshot) -> None:
        """Keep one more, at the expense of the one that leaves the smallest gap; the newest stays."""
        if snapshot.length <= self.newest:
            return
        self.kept.append(snapshot)
        if len(self.kept) > self.most:
            lengths = [0, *(kept.length for kept in self.kept)]
            gaps = [lengths[i + 2] - lengths[i] for i in range(len(self.kept) - 1)]
            del self.kept[gaps.index(min(gaps))]

    def nearest(self, length: int) -> Snapshot | None:
        """The longest of at most `length` positions; longer ones are dropped."""
        while self.kept and self.kept[-1].length > length:
            self.kept.pop()
        return self.kept[-1] if self.kept else None
