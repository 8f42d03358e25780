"""How often units are asked for, and which of those that are kept will be needed the latest.

Units belong to groups (the experts of a layer) that are asked for in turn, pass after pass. To let the least
recently used leave would be the worst choice then: where a pass asks for more than there is room for, every
unit leaves just before its group's turn comes again. So what leaves is expected to be needed the latest: by
its group's turn, and by how many passes it will be until it is asked for.
"""

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import numpy.typing as npt

_ROWS = 32  # that an average is made over, about
_LEAST = 1e-4  # chance of a unit to be asked for in a pass


class Usage:
    """Running averages by unit of the share of rows that ask for it.

    Args:
        groups: The group of each unit, in the order of their turns, from 0.
        share: Of rows that ask for a unit, before anything is known. Default 0.1.
    """

    def __init__(self, groups: Sequence[int], share: float = 0.1) -> None:
        self.groups = np.array(groups, np.int64)
        self._turns = int(self.groups.max()) + 1
        self.shares: npt.NDArray[np.float32] = np.full(len(groups), share, np.float32)
        self._turn, self._rows = 0, 1

    def note(self, units: Sequence[int], counts: Sequence[int], rows: int) -> None:
        """A pass of `rows` rows asked for these units of a group, each by so many of them."""
        if not units:
            return
        self._turn, self._rows = int(self.groups[units[0]]), rows
        weight = rows / (rows + _ROWS)
        self.shares[self.groups == self._turn] *= 1 - weight
        self.shares[list(units)] += weight * np.array(counts, np.float32) / rows

    def likeliest(self, count: int) -> list[int]:
        """`count` of all units that the most rows ask for; they first."""
        return [int(unit) for unit in np.argsort(-self.shares, kind="stable")[:count]]

    def leaving(self, kept: Collection[int], asked: Collection[int], count: int) -> Iterator[int]:
        """Units to give up for `count` others, in this order; none that are asked for now."""
        others = [unit for unit in kept if unit not in asked] if count > 0 else []
        return iter(self.latest(others, count) if others else [])

    def latest(self, kept: Sequence[int], count: int) -> list[int]:
        """`count` of the units that are kept, or all, that are expected to be needed the latest; they first.

        Those of the group whose turn it is might be asked for again at once, by more rows of a prompt.
        """
        units = np.array(kept, np.int64)
        ahead = (self.groups[units] - self._turn) % self._turns / self._turns
        chance = 1 - (1 - self.shares[units]) ** self._rows
        passes = ahead + 1 / np.maximum(chance, _LEAST)
        return [int(unit) for unit in units[np.argsort(-passes, kind="stable")[:count]]]
