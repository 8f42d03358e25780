"""Order of visiting a tree of rows, and storage of the states on the way.

A state is advanced from row to row along a path. If a row has several children, its state is kept until all
of them have used it; the child with the most rows below it comes last and overwrites it. So the number of
states kept at a time is at most the logarithm of the number of rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TraversalOrder:
    """Steps, one for each row; a row with children is followed by one of them.

    Args:
        row: [T] int32, row of each step.
        source: [T] int32, place of the state it starts from; the state before all rows is in place 0.
        target: [T] int32, place of the state after it.
        places: Number of places.
        kept: Device copies, reused by the next layer of a pass.
    """

    row: NDArray[np.int32]
    source: NDArray[np.int32]
    target: NDArray[np.int32]
    places: int
    kept: dict[object, Any] = field(default_factory=dict, compare=False, repr=False)

    def remap_rows(self, rows: NDArray[np.int64]) -> "TraversalOrder":
        """Return the same steps with row numbers mapped through `rows` [T]."""
        return TraversalOrder(rows[self.row].astype(np.int32), self.source, self.target, self.places)


def traversal_order(parents: Sequence[int]) -> TraversalOrder:
    """Return the steps of rows whose parents come before them; -1: the state before all rows."""
    count = len(parents)
    children: list[list[int]] = [
        [] for _ in range(count + 1)
    ]  # the last: children of the state before all rows
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
    return TraversalOrder(table[0], table[1], table[2], places)
