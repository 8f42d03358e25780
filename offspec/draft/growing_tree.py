"""A token tree while it grows, with the log-probabilities that draft sources give its nodes.

Letters: N nodes so far, S sources, W nodes expanded together, K proposed children of each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from offspec.draft.mix.weights import MixtureWeights
from offspec.sampling.format_rule import ConstraintRule
from offspec.sampling.token_tree import NO_PARENT, ROOT, TokenTree


@dataclass(frozen=True, slots=True)
class Subtree:
    """Draft tokens below one node: n nodes, parents first.

    parent [n]: index of an earlier node, or -1 for the node itself; token [n]; log_prob [n], given the
    parent.
    """

    parent: Sequence[int]
    token: Sequence[int]
    log_prob: Sequence[float]

    def pruned(
        self, ends: frozenset[int], format: ConstraintRule | None = None, path: Sequence[int] = ()
    ) -> "Subtree":
        """Return a copy without descendants of the tokens in `ends` and without tokens that the format
        forbids.

        path: tokens from the root to the node above this subtree.
        """
        if format is None and ends.isdisjoint(self.token):
            return self
        place = {NO_PARENT: NO_PARENT}  # new numbers of kept nodes that may have children
        paths = {NO_PARENT: tuple(path)}
        kept = list[int]()
        for node, (parent, token) in enumerate(zip(self.parent, self.token, strict=True)):
            if parent in place:
                paths[node] = (*paths[parent], token)
                if format is not None and not format.allows_path(paths[node]):
                    continue
                if token not in ends:
                    place[node] = len(kept)
                kept.append(node)
        return Subtree(
            [place[self.parent[node]] for node in kept],
            [self.token[node] for node in kept],
            [self.log_prob[node] for node in kept],
        )


class GrowingTree:
    """A tree while it grows: it has more nodes than the budget, and the best will be kept.

    Columns as in `TokenTree`, in order of creation, in arrays that grow by doubling. Several sources may
    propose children of one node: `source_log_probs` [S, N] is the log-probability that each source gives a
    node, given its parent, and `expanded_by` [S, N] marks the sources that were asked for a node's children.
    The probability of a child comes from its only source, or from the mixture weights if there are several.
    `forced` [N] marks nodes after which the target has no choice: the one child has probability 1, whatever
    the sources predict.
    """

    _COLUMNS = (
        "token",
        "parent",
        "depth",
        "score",
        "forced",
        "_log_prob",
        "_has_children",
        "source_log_probs",
        "expanded_by",
    )

    def __init__(self, root_token: int, sources: int = 1) -> None:
        self.count = 1
        self.token = np.full(1024, root_token, dtype=np.int64)
        self.parent = np.full(1024, NO_PARENT, dtype=np.int64)
        self.depth = np.zeros(1024, dtype=np.int64)
        self.score = np.zeros(1024, dtype=np.float64)
        self.source_log_probs: NDArray[np.float32] = np.full((sources, 1024), np.nan, dtype=np.float32)
        self.expanded_by: NDArray[np.bool_] = np.zeros((sources, 1024), dtype=np.bool_)
        self.forced: NDArray[np.bool_] = np.zeros(1024, dtype=np.bool_)
        self._log_prob = np.zeros(1024, dtype=np.float64)  # log-probability given the parent
        self._has_children = np.zeros(1024, dtype=np.bool_)

    def extend(
        self,
        parents: NDArray[np.int64],
        tokens: NDArray[np.int64],
        log_probs: NDArray[np.floating],
        floor: float = -np.inf,
        source: int = 0,
        weights: MixtureWeights | None = None,
    ) -> None:
        """Append a source's children of W nodes, [W, K], whose score is better than `floor`.

        If other sources have proposed children of these nodes before, `weights` combines the probabilities;
        it is not needed with a single source.
        """
        crowded = self._has_children[parents]
        if crowded.any():
            assert weights is not None, "two sources at one node take a blend"
            for place in np.flatnonzero(crowded).tolist():
                listed = log_probs[place] > -np.inf
                if listed.any():  # otherwise the source has no prediction here
                    known, given = tokens[place][listed], log_probs[place][listed]
                    self._merge(int(parents[place]), known, given, source, weights)
            self._rescore()
            parents, tokens, log_probs = parents[~crowded], tokens[~crowded], log_probs[~crowded]
        likely = np.minimum(log_probs.astype(np.float64), 0.0)
        row, column = np.nonzero(self.score[parents][:, None] + likely > floor)
        self._append(parents[row], tokens[row, column], likely[row, column], source)

    def graft(self, node: int, subtree: Subtree, source: int, weights: MixtureWeights | None = None) -> None:
        """Append a source's draft tokens below one node, several levels at once."""
        place = {NO_PARENT: node}
        groups: dict[int, list[int]] = {}
        for index, parent in enumerate(subtree.parent):
            groups.setdefault(parent, []).append(index)
        if not self._has_children[node]:
            base = self.count
            parents = np.array([node if above < 0 else base + above for above in subtree.parent], np.int64)
            given = np.minimum(np.array(subtree.log_prob, np.float64), 0.0)
            self._append(parents, np.array(subtree.token, np.int64), given, source)
            place |= {index: base + index for index in range(len(subtree.token))}
        else:
            assert weights is not None, "two sources at one node take a blend"
            for above, below in groups.items():
                tokens = np.array([subtree.token[index] for index in below], np.int64)
                given = np.minimum(np.array([subtree.log_prob[index] for index in below], np.float64), 0.0)
                nodes = self._merge(place[above], tokens, given, source, weights)
                place |= zip(below, nodes, strict=True)
            self._rescore()
        for above in groups:
            self.expanded_by[source, place[above]] = True

    def append_forced(self, node: int, tokens: Sequence[int]) -> int:
        """Append a chain of forced tokens below a node and return its last node.

        Some of them may exist already, if a source proposed them.
        """
        guessed = False
        for token in tokens:
            below = self.children(node)
            self.forced[node] = True
            if len(below):
                assert self.token[below].tolist() == [token], "a forced token has no siblings"
                guessed, node = True, int(below[0])
                self._log_prob[node] = 0.0
            else:
                self._append(np.array([node]), np.array([token]), np.zeros(1))
                node = self.count - 1
        if guessed:
            self._rescore()
        return node

    def _append(
        self,
        parents: NDArray[np.int64],
        tokens: NDArray[np.int64],
        given: NDArray[np.float64],
        source: int | None = None,
    ) -> None:
        """Append n nodes, parents before their children. source: the source that proposed them, if any."""
        start, end = self.count, self.count + len(parents)
        while end > len(self.token):
            for name in self._COLUMNS:
                kept = getattr(self, name)
                fresh = np.full_like(kept, np.nan if name == "source_log_probs" else 0)
                setattr(self, name, np.concatenate([kept, fresh], axis=-1))
        self.token[start:end] = tokens
        self.parent[start:end] = parents
        self._log_prob[start:end] = given
        if source is not None:
            self.source_log_probs[source, start:end] = given
        self._has_children[parents] = True
        self.count = end
        inner = np.flatnonzero(parents >= start)  # nodes below other new nodes, as in a subtree
        outer = slice(start, end)
        self.depth[outer] = self.depth[parents] + 1
        self.score[outer] = self.score[parents] + given
        for index in inner.tolist():
            node, above = start + index, parents[index]
            self.depth[node] = self.depth[above] + 1
            self.score[node] = self.score[above] + given[index]

    def _merge(
        self,
        parent: int,
        tokens: NDArray[np.int64],
        given: NDArray[np.floating],
        source: int,
        weights: MixtureWeights,
    ) -> list[int]:
        """Add children [K] of one node, merging them with existing ones, and return their nodes.

        Scores are not updated; call `_rescore` afterwards.
        """
        siblings = self.children(parent)
        if self.forced[parent]:
            return [int(siblings[0])] * len(tokens)
        place = {
            token: int(node) for node, token in zip(siblings, self.token[siblings].tolist(), strict=True)
        }
        fresh = np.array([token not in place for token in tokens.tolist()], dtype=np.bool_)
        start = self.count
        self._append(
            np.full(int(fresh.sum()), parent), tokens[fresh], given[fresh].astype(np.float64), source
        )
        place |= zip(tokens[fresh].tolist(), range(start, self.count), strict=True)
        nodes = [place[token] for token in tokens.tolist()]
        if len(siblings):
            every = np.concatenate([siblings, np.arange(start, self.count)])
            spoke: NDArray[np.bool_] = np.logical_not(
                np.isnan(self.source_log_probs[:, siblings]).all(axis=1)
            )
            spoke[source] = True
            said: NDArray[np.float32] = self.source_log_probs[:, every]
            self.source_log_probs[:, every] = np.where(
                spoke[:, None] & np.isnan(said), np.float32(-np.inf), said
            )
            self.source_log_probs[source, nodes] = given
            self._log_prob[every] = np.minimum(weights.combine(self.source_log_probs[:, every]), 0.0)
        return nodes

    def _rescore(self) -> None:
        for nodes in self._levels(1):
            self.score[nodes] = self.score[self.parent[nodes]] + self._log_prob[nodes]

    def _levels(self, first: int) -> Iterator[NDArray[np.int64]]:
        """Yield the nodes of each level from `first` on."""
        depth = self.depth[: self.count]
        order = np.argsort(depth, kind="stable")
        ends = np.searchsorted(depth[order], np.arange(first, int(depth.max()) + 2))
        for start, end in pairwise(ends.tolist()):
            yield order[start:end]

    def subtree(self, node: int, source: int = 0) -> "tuple[GrowingTree, NDArray[np.int64]]":
        """Return the part of the tree that one source proposed below a node, as a tree, and its nodes in this
        one.

        Log-probabilities of other sources are left out: they will know more of the text when the node becomes
        the root.
        """
        said = self.source_log_probs[source, : self.count]
        inside = np.zeros(self.count, np.bool_)
        inside[node] = True
        for nodes in self._levels(int(self.depth[node]) + 1):
            inside[nodes] = inside[self.parent[nodes]] & np.isfinite(said[nodes])
        kept = np.flatnonzero(inside)
        tree = GrowingTree(int(self.token[node]), len(self.source_log_probs))
        tree.count = len(kept)
        for name in self._COLUMNS:
            fresh, fill = getattr(tree, name), np.nan if name == "source_log_probs" else 0
            more = [(0, 0)] * (fresh.ndim - 1) + [(0, max(tree.count - fresh.shape[-1], 0))]
            setattr(tree, name, np.pad(fresh, more, constant_values=fill))
        place = np.full(self.count, NO_PARENT, np.int64)
        place[kept] = np.arange(len(kept))
        tree.token[: tree.count] = self.token[kept]
        tree.parent[1 : tree.count] = place[self.parent[kept[1:]]]
        tree.depth[: tree.count] = self.depth[kept] - self.depth[node]
        tree.source_log_probs[source, 1 : tree.count] = said[kept[1:]]
        tree.expanded_by[source, : tree.count] = self.expanded_by[source, kept]
        tree._log_prob[1 : tree.count] = np.minimum(said[kept[1:]], 0.0)
        tree._has_children[tree.parent[1 : tree.count]] = True
        tree._rescore()
        return tree, kept

    def children(self, node: int) -> NDArray[np.int64]:
        """Return the children of a node, oldest first."""
        return np.flatnonzero(self.parent[: self.count] == node)

    def is_forced(self, nodes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether each node is the only token that may follow its parent."""
        parents = self.parent[nodes]
        alone: NDArray[np.bool_] = self.forced[parents] & (parents != NO_PARENT)
        return alone

    def best(self, budget: int) -> NDArray[np.int64]:
        """Return the best `budget` nodes, ascending. They form a subtree, since scores never rise along a
        path.
        """
        if self.count <= budget:
            return np.arange(self.count)
        # Ties go to the older node, so a parent is never left out in favour of its own child.
        return np.sort(np.argsort(-self.score[: self.count], kind="stable")[:budget])

    def path_tokens(self, node: int) -> list[int]:
        """Return the tokens from the first below the root down to `node`."""
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(int(self.token[node]))
            node = int(self.parent[node])
        return tokens[::-1]

    def tree(self, nodes: NDArray[np.int64]) -> TokenTree:
        """Return the subtree of the given ascending nodes.

        The source of a node is the one that gives it the highest probability, or the number of sources if the
        node is forced.
        """
        place = np.full(self.count, NO_PARENT, dtype=np.int64)
        place[nodes] = np.arange(len(nodes))
        parent = np.where(self.parent[nodes] == NO_PARENT, NO_PARENT, place[self.parent[nodes]])
        said: NDArray[np.float32] = np.nan_to_num(self.source_log_probs[:, nodes], nan=-np.inf)
        likeliest = said.argmax(axis=0) if len(said) else np.zeros(len(nodes), np.int64)
        return TokenTree(
            token=self.token[nodes].copy(),
            parent=parent,
            depth=self.depth[nodes].copy(),
            score=self.score[nodes].copy(),
            source=np.where(self.is_forced(nodes), len(said), likeliest),
        )
