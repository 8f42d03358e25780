"""The order in which a tree of rows is walked, and where the state behind each row is put on the way.

A state is advanced from row to row along a path. Where a row has several children, its state waits for all of
them; the child with most rows below it comes last and overwrites it. So no more states wait at a time than
the logarithm of the number of rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class WalkOrder:
    """Steps, one for each row; behind a row with children comes one of them.

    Args:
        row: [T] int32, which row a step is.
        source: [T] int32, the place of the state that it starts from; that before all rows is in place 0.
        target: [T] int32, the place of the state behind it.
        places: How many places there are.
        kept: What devices hold of it, for the next layer of a pass.
    """

    row: NDArray[np.int32]
    source: NDArray[np.int32]
    target: NDArray[np.int32]
    places: int
    kept: dict[object, Any] = field(default_factory=dict, compare=False, repr=False)

    def renamed(self, rows: NDArray[np.int64]) -> "WalkOrder":
        """The same steps to rows that have other numbers: `rows` [T] has that of each."""
        return WalkOrder(rows[self.row].astype(np.int32), self.source, self.target, self.places)


def walk_order(parents: Sequence[int]) -> WalkOrder:
    """The steps of rows whose parents come before them; -1: the state before all rows."""
    count = len(parents)
    children: list[list[int]] = [[] for _ in range(count + 1)]  # the last: of the state before all rows
    below = [1] * count
    for row in range(count - 1, -1, -1):
        children[parents[row]].append(row)
        if parents[row] >= 0:
            below[parents[row]] += below[row]
    for rows in children:
        rows.sort(key=below.__getitem__, reverse=True)
    left, place = [len(rows) for rows in children], [0] * (count + 1)
    steps, free, places = list[tuple[int, int, int]](), list[int](), 1
    ahead = list(children[count])
    while ahead:
        row = ahead.pop()
        source = place[parents[row]]
        left[parents[row]] -= 1
        if left[parents[row]] == 0:
            place[row] = source
        elif free:
            place[row] = free.pop()
        else:
            place[row], places = places, places + 1
        if not children[row]:
            free.append(place[row])
        steps.append((row, source, place[row]))
        ahead += children[row]
    table = np.array(steps, np.int32).reshape(-1, 3).T.copy()
    return WalkOrder(table[0], table[1], table[2], places)
