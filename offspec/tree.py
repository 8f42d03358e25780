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

    token [N] int64, the vocabulary id; parent [N] int64, -1 for the root alone; depth [N] int64, 0 for the
    root; score [N] float64, the log of the probability that the target takes the path to this node, 0 for
    the root and never above the parent's; source [N] int64, which drafter proposed the node. Siblings hold
    distinct tokens.
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


class Candidates:
    """A tree while it grows: more nodes than the budget, of which the best will be kept.

    Columns as in `TokenTree`, in order of creation, in arrays that grow by doubling. A node is expanded
    once the draft has been asked for its children.
    """

    def __init__(self, root_token: int) -> None:
        self.count = 1
        self.token = np.full(1024, root_token, dtype=np.int64)
        self.parent = np.full(1024, NO_PARENT, dtype=np.int64)
        self.depth = np.zeros(1024, dtype=np.int64)
        self.score = np.zeros(1024, dtype=np.float64)
        self.expanded = np.zeros(1024, dtype=np.bool_)

    def add(self, parent: int, tokens: NDArray[np.int64], log_probs: NDArray[np.floating]) -> None:
        """Append children [K] of one node, with their log-probabilities given that node (at most 0)."""
        self.extend(np.array([parent]), tokens[None], log_probs[None])

    def extend(
        self,
        parents: NDArray[np.int64],
        tokens: NDArray[np.int64],
        log_probs: NDArray[np.floating],
        floor: float = -np.inf,
    ) -> None:
        """Append children [W, K] of W nodes, but for those that score no better than `floor`."""
        scores = self.score[parents][:, None] + np.minimum(log_probs.astype(np.float64), 0.0)
        row, column = np.nonzero(~(scores <= floor))
        start, end = self.count, self.count + len(row)
        while end > len(self.token):
            for name in ("token", "parent", "depth", "score", "expanded"):
                kept = getattr(self, name)
                setattr(self, name, np.concatenate([kept, np.zeros_like(kept)]))
        self.token[start:end] = tokens[row, column]
        self.parent[start:end] = parents[row]
        self.depth[start:end] = self.depth[parents[row]] + 1
        self.score[start:end] = scores[row, column]
        self.expanded[start:end] = False
        self.count = end

    def best(self, budget: int) -> NDArray[np.int64]:
        """The best `budget` nodes, ascending. They form a subtree, since no score rises along a path."""
        if self.count <= budget:
            return np.arange(self.count)
        # Among equals the older node wins, so a parent is never left out for its own child.
        return np.sort(np.argsort(-self.score[: self.count], kind="stable")[:budget])

    def path_tokens(self, node: int) -> list[int]:
        """The tokens from the first below the root down to `node`."""
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(int(self.token[node]))
            node = int(self.parent[node])
        return tokens[::-1]

    def tree(self, nodes: NDArray[np.int64]) -> TokenTree:
        """The subtree of the given ascending nodes."""
        place = np.full(self.count, NO_PARENT, dtype=np.int64)
        place[nodes] = np.arange(len(nodes))
        parent = np.where(self.parent[nodes] == NO_PARENT, NO_PARENT, place[self.parent[nodes]])
        return TokenTree(
            token=self.token[nodes].copy(),
            parent=parent,
            depth=self.depth[nodes].copy(),
            score=self.score[nodes].copy(),
            source=np.zeros(len(nodes), dtype=np.int64),
        )
