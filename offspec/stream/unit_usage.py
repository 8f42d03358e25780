"""Usage frequency of units, and the eviction order derived from it.

Units belong to groups (the experts of a layer) that are requested in cyclic order, pass after pass. LRU
eviction is the worst policy for that: if a pass requests more units than fit, every unit is evicted just
before its group is requested again. So units that are expected to be needed last are evicted first. The
expectation is based on the position of their group in the cycle and the number of passes until they are
requested.
"""

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import numpy.typing as npt

_ROWS = 32  # approximate number of rows in a running average
_LEAST = 1e-4  # minimum probability that a pass requests a unit


class UnitUsage:
    """Running average, for each unit, of the share of rows that use it.

    Args:
        groups: Group of each unit; groups are numbered from 0 in the order of their requests.
        share: Initial share of rows that use a unit. Default 0.1.
    """

    def __init__(self, groups: Sequence[int], share: float = 0.1) -> None:
        self.groups = np.array(groups, np.int64)
        self._turns = int(self.groups.max()) + 1
        self.shares: npt.NDArray[np.float32] = np.full(len(groups), share, np.float32)
        self._turn, self._rows = 0, 1

    def note(self, units: Sequence[int], counts: Sequence[int], rows: int) -> None:
        """Record that a pass of `rows` rows used these units of a group, each by `counts` rows."""
        if not units:
            return
        self._turn, self._rows = int(self.groups[units[0]]), rows
        weight = rows / (rows + _ROWS)
        self.shares[self.groups == self._turn] *= 1 - weight
        self.shares[list(units)] += weight * np.array(counts, np.float32) / rows

    def most_used(self, count: int) -> list[int]:
        """Return the `count` units with the largest shares, in descending order."""
        return [int(unit) for unit in np.argsort(-self.shares, kind="stable")[:count]]

    def eviction_order(self, kept: Collection[int], asked: Collection[int], count: int) -> Iterator[int]:
        """Return units to evict for `count` others, in order, except units in `asked`."""
        others = [unit for unit in kept if unit not in asked] if count > 0 else []
        return iter(self.needed_latest(others, count) if others else [])

    def needed_latest(self, kept: Sequence[int], count: int) -> list[int]:
        """Return up to `count` cached units that are expected to be needed last, the latest first.

        Units of the current group count as needed at once, because more rows of a prompt may request them.
        """
        units = np.array(kept, np.int64)
        ahead = (self.groups[units] - self._turn) % self._turns / self._turns
        chance = 1 - (1 - self.shares[units]) ** self._rows
        passes = ahead + 1 / np.maximum(chance, _LEAST)
        return [int(unit) for unit in units[np.argsort(-passes, kind="stable")[:count]]]
