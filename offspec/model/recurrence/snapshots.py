"""Snapshots of recurrent states to resume a text from, since a state cannot be truncated like a KV cache."""

from collections.abc import Mapping
from dataclasses import dataclass

from offspec.model.recurrence.state import RecurrentState

MOST, OF_DRAFT = 4, 1  # maximum number for a target, and for a draft, which recomputes quickly
SPACING = 256  # maximum committed positions between snapshots, before any is dropped
Place = tuple[int, int]  # layer, and index of a recurrence in it


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All recurrent states of a model after `length` positions."""

    length: int
    states: Mapping[Place, RecurrentState]

    def copy(self) -> "Snapshot":
        """Return a copy with its own states."""
        return Snapshot(self.length, {place: found.copy() for place, found in self.states.items()})


class Snapshots:
    """Snapshots of one text in `kept`, ascending by length; at most `most`."""

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self.kept: list[Snapshot] = []

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of all snapshots, ascending."""
        return tuple(kept.length for kept in self.kept)

    @property
    def newest(self) -> int:
        """Length of the longest snapshot; 0 if there is none."""
        return self.kept[-1].length if self.kept else 0

    def add(self, snapshot: Snapshot) -> None:
        """Add a snapshot, if needed dropping the one that leaves the smallest gap; the newest is kept."""
        if snapshot.length <= self.newest:
            return
        self.kept.append(snapshot)
        if len(self.kept) > self.most:
            lengths = [0, *(kept.length for kept in self.kept)]
            gaps = [lengths[i + 2] - lengths[i] for i in range(len(self.kept) - 1)]
            del self.kept[gaps.index(min(gaps))]

    def nearest(self, length: int) -> Snapshot | None:
        """Drop snapshots longer than `length` positions; return the longest that is left, or None."""
        while self.kept and self.kept[-1].length > length:
            self.kept.pop()
        return self.kept[-1] if self.kept else None
