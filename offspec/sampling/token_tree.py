"""Token tree: draft tokens that the target verifies in one pass.

Letters: N nodes. Node 0 is the root: the last committed token, whose key and value the target has not
computed yet. Every other node is a draft token that follows its parent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ROOT = 0
NO_PARENT = -1


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Immutable tree in topological order: each parent comes before its children.

    Siblings have distinct tokens.

    Args:
        token: [N] int64, vocabulary ids.
        parent: [N] int64, -1 for the root only.
        depth: [N] int64, 0 for the root.
        score: [N] float64, log-probability that the target accepts the path to this node; 0 for the root, and
            never above the parent's score.
        source: [N] int64, index of the drafter that proposed the node.
    """

    token: NDArray[np.int64]
    parent: NDArray[np.int64]
    depth: NDArray[np.int64]
    score: NDArray[np.float64]
    source: NDArray[np.int64]

    @classmethod
    def single(cls, token: int) -> "TokenTree":
        """Return a tree without draft tokens, only a root. A pass over it is plain decoding."""
        return cls.build([token], [NO_PARENT], [0.0])

    @classmethod
    def build(
        cls,
        token: Sequence[int],
        parent: Sequence[int],
        score: Sequence[float],
        source: Sequence[int] | None = None,
    ) -> "TokenTree":
        """Build a tree from its columns; depths follow from the parents. Asserts the invariants."""
        parents = np.asarray(parent, dtype=np.int64)
        depth = np.zeros(len(parents), dtype=np.int64)
        for node in range(1, len(parents)):
            depth[node] = depth[parents[node]] + 1
        tree = cls(
            token=np.asarray(token, dtype=np.int64),
            parent=parents,
            depth=depth,
            score=np.asarray(score, dtype=np.float64),
            source=np.zeros(len(parents), np.int64) if source is None else np.asarray(source, np.int64),
        )
        tree.check()
        return tree

    def __len__(self) -> int:
        return len(self.token)

    @property
    def expected_tokens(self) -> float:
        """Expected number of tokens that a pass over this tree emits, bonus token included."""
        return float(np.exp(self.score).sum())

    def check(self) -> None:
        """Assert the invariants of a tree."""
        count = len(self.token)
        assert count >= 1 and self.parent[ROOT] == NO_PARENT and self.depth[ROOT] == 0
        assert all(len(column) == count for column in (self.parent, self.depth, self.score, self.source))
        rest, parents = np.arange(1, count), self.parent[1:]
        assert ((parents >= 0) & (parents < rest)).all(), "a parent must stand before its children"
        assert (self.depth[1:] == self.depth[parents] + 1).all()
        assert (self.score[1:] <= self.score[parents] + 1e-9).all(), "a score must not rise along a path"
        pairs = set(zip(parents.tolist(), self.token[1:].tolist(), strict=True))
        assert len(pairs) == count - 1, "siblings must hold distinct tokens"

    def ancestors(self) -> NDArray[np.bool_]:
        """Return [N, N] bool: entry (i, j) is true if j is i or on the path from the root to i."""
        count = len(self)
        mask = np.eye(count, dtype=np.bool_)
        for node in range(1, count):
            mask[node] |= mask[self.parent[node]]
        return mask

    def path(self, node: int) -> list[int]:
        """Return the nodes on the path to `node`, without the root; empty for the root."""
        nodes: list[int] = []
        while node != ROOT:
            nodes.append(node)
            node = int(self.parent[node])
        return nodes[::-1]

    def path_tokens(self, node: int) -> list[int]:
        """Return the tokens along `path(node)`, which are committed if the target accepts the node."""
        return [int(self.token[step]) for step in self.path(node)]

    def children(self, node: int) -> dict[int, int]:
        """Return the children of `node` as a mapping from token to node."""
        return {int(self.token[child]): int(child) for child in np.flatnonzero(self.parent == node)}
