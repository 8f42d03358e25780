"""Mapping from nodes of a growing tree to rows of a draft's cache, and the attention mask among them."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from offspec.draft.growing_tree import GrowingTree


class TreeRows:
    """Rows in the order in which nodes were added; earlier rows of the cache are not covered.

    A node attends to itself and to the rows its parent attends to. A node whose parent has no row attends
    only to itself.
    """

    def __init__(self) -> None:
        self._row_of: dict[int, int] = {}  # candidate to row
        self._sees = np.zeros((64, 64), dtype=np.bool_)

    def __len__(self) -> int:
        return len(self._row_of)

    @property
    def sees(self) -> NDArray[np.bool_]:
        """View [R, R] for R rows: entry (i, j) is true if row i may attend to row j."""
        rows = len(self._row_of)
        return self._sees[:rows, :rows]

    def place(self, candidates: GrowingTree, nodes: Sequence[int]) -> None:
        """Assign rows to the nodes, parents before children."""
        needed = len(self._row_of) + len(nodes)
        if needed > len(self._sees):
            grown = np.zeros((2 * needed, 2 * needed), dtype=np.bool_)
            grown[: len(self._sees), : len(self._sees)] = self._sees
            self._sees = grown
        for node, parent in zip(nodes, candidates.parent[nodes].tolist(), strict=True):
            row = self._row_of[node] = len(self._row_of)
            if parent in self._row_of:
                self._sees[row] = self._sees[self._row_of[parent]]
            self._sees[row, row] = True

    def of(self, nodes: Sequence[int]) -> list[int]:
        """Return the rows of those nodes that have one."""
        return [self._row_of[node] for node in nodes if node in self._row_of]

    def subset(self, places: Mapping[int, int]) -> "tuple[TreeRows, list[int]]":
        """Return the rows of some nodes under new numbers, and their old row numbers, ascending.

        places: new number by node. All nodes have rows, and so do their ancestors up to the new root.
        """
        order = sorted((self._row_of[node], place) for node, place in places.items())
        rows, kept = [row for row, _ in order], TreeRows()
        kept._row_of = {place: index for index, (_, place) in enumerate(order)}
        kept._sees = self._sees[np.ix_(rows, rows)]
        return kept, rows

    def clear(self) -> None:
        self._row_of.clear()
        self._sees[:] = False
