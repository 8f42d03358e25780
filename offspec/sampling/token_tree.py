"""The token tree: guesses at what the target will say, shaped so that one pass can check them all.

Letters: N nodes. Node 0 is the root: the last committed token, whose key and value the target has not
computed yet. Every other node guesses one token that follows its parent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ROOT = 0
NO_PARENT = -1


@dataclass(frozen=True, slots=True)
class TokenTree:
    """An immutable tree in topological order: a parent always stands before its children.

    Siblings hold distinct tokens.

    Args:
        token: [N] int64, vocabulary ids.
        parent: [N] int64, -1 for the root alone.
        depth: [N] int64, 0 for the root.
        score: [N] float64, the log of the probability that the target takes the path to this node, 0 for the
            root and never above the parent's.
        source: [N] int64, which drafter proposed the node.
    """

    token: NDArray[np.int64]
    parent: NDArray[np.int64]
    depth: NDArray[np.int64]
    score: NDArray[np.float64]
    source: NDArray[np.int64]

    @classmethod
    def single(cls, token: int) -> "TokenTree":
        """The tree that guesses nothing: its root alone. A pass over it is plain decoding."""
        return cls.build([token], [NO_PARENT], [0.0])

    @classmethod
    def build(
        cls,
        token: Sequence[int],
        parent: Sequence[int],
        score: Sequence[float],
        source: Sequence[int] | None = None,
    ) -> "TokenTree":
        """A tree from its columns; the depths follow from the parents. Asserts the invariants."""
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
        """Tokens one pass over this tree is expected to emit, the bonus token included."""
        return float(np.exp(self.score).sum())

    def check(self) -> None:
        """Assert the invariants that every other part relies on."""
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
        """[N, N] bool: entry (i, j) is true where j is i itself or stands on the path from the root to i."""
        count = len(self)
        mask = np.eye(count, dtype=np.bool_)
        for node in range(1, count):
            mask[node] |= mask[self.parent[node]]
        return mask

    def path(self, node: int) -> list[int]:
        """The nodes from the first below the root down to `node`; empty for the root."""
        nodes: list[int] = []
        while node != ROOT:
            nodes.append(node)
            node = int(self.parent[node])
        return nodes[::-1]

    def path_tokens(self, node: int) -> list[int]:
        """The tokens along `path(node)`: what is committed after the root if the target goes there."""
        return [int(self.token[step]) for step in self.path(node)]

    def children(self, node: int) -> dict[int, int]:
        """Token to node, for the children of `node`."""
        return {int(self.token[child]): int(child) for child in np.flatnonzero(self.parent == node)}
