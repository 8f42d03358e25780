"""A token tree while it grows, and what the sources of guesses say about its nodes.

Letters: N nodes so far, S sources, W nodes expanded together, K guesses at the children of each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from offspec.draft.mix.weights import Blended
from offspec.sampling.constraint import Format
from offspec.sampling.token_tree import NO_PARENT, ROOT, TokenTree


@dataclass(frozen=True, slots=True)
class Subtree:
    """Guesses below one node, n of them, parents first.

    parent [n]: an earlier one of these, or -1 for the node itself; token [n]; log_prob [n], given the parent.
    """

    parent: Sequence[int]
    token: Sequence[int]
    log_prob: Sequence[float]

    def closed(
        self, ends: frozenset[int], format: Format | None = None, path: Sequence[int] = ()
    ) -> "Subtree":
        """The same without what hangs below these tokens, and without what an answer's format closes.

        path: tokens from the root to the node that this is below.
        """
        if format is None and ends.isdisjoint(self.token):
            return self
        place = {NO_PARENT: NO_PARENT}  # of what is kept and may have children
        paths = {NO_PARENT: tuple(path)}
        kept = list[int]()
        for node, (parent, token) in enumerate(zip(self.parent, self.token, strict=True)):
            if parent in place:
                paths[node] = (*paths[parent], token)
                if format is not None and not format.fits(paths[node]):
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
    """A tree while it grows: more nodes than the budget, of which the best will be kept.

    Columns as in `TokenTree`, in order of creation, in arrays that grow by doubling. Several sources may
    guess at the children of a node: `said` [S, N] is the log-probability that each of S sources gives a node,
    given its parent, and `asked` [S, N] tells who was asked for a node's children. The likelihood of a
    child is what the only source says, or what a blend makes of several. A node is `settled` [N] where the
    target has no choice: its one child has the likelihood 1, whatever sources say.
    """

    _COLUMNS = ("token", "parent", "depth", "score", "settled", "_given", "_crowded", "said", "asked")

    def __init__(self, root_token: int, sources: int = 1) -> None:
        self.count = 1
        self.token = np.full(1024, root_token, dtype=np.int64)
        self.parent = np.full(1024, NO_PARENT, dtype=np.int64)
        self.depth = np.zeros(1024, dtype=np.int64)
        self.score = np.zeros(1024, dtype=np.float64)
        self.said: NDArray[np.float32] = np.full((sources, 1024), np.nan, dtype=np.float32)
        self.asked: NDArray[np.bool_] = np.zeros((sources, 1024), dtype=np.bool_)
        self.settled: NDArray[np.bool_] = np.zeros(1024, dtype=np.bool_)
        self._given = np.zeros(1024, dtype=np.float64)  # log-probability given the parent
        self._crowded = np.zeros(1024, dtype=np.bool_)  # has children

    def extend(
        self,
        parents: NDArray[np.int64],
        tokens: NDArray[np.int64],
        log_probs: NDArray[np.floating],
        floor: float = -np.inf,
        source: int = 0,
        blend: Blended | None = None,
    ) -> None:
        """Append what a source guesses below W nodes, [W, K], where it scores better than `floor`.

        Where others have guessed before, the blend says how likely all of them are; it is not needed where
        there is one source.
        """
        crowded = self._crowded[parents]
        if crowded.any():
            assert blend is not None, "two sources at one node take a blend"
            for place in np.flatnonzero(crowded).tolist():
                listed = log_probs[place] > -np.inf
                if listed.any():  # else it has nothing to say here, which is no opinion
                    known, given = tokens[place][listed], log_probs[place][listed]
                    self._merge(int(parents[place]), known, given, source, blend)
            self._rescore()
            parents, tokens, log_probs = parents[~crowded], tokens[~crowded], log_probs[~crowded]
        likely = np.minimum(log_probs.astype(np.float64), 0.0)
        row, column = np.nonzero(self.score[parents][:, None] + likely > floor)
        self._append(parents[row], tokens[row, column], likely[row, column], source)

    def graft(self, node: int, subtree: Subtree, source: int, blend: Blended | None = None) -> None:
        """Append what a source guesses below one node, several levels at once."""
        place = {NO_PARENT: node}
        groups: dict[int, list[int]] = {}
        for index, parent in enumerate(subtree.parent):
            groups.setdefault(parent, []).append(index)
        if not self._crowded[node]:
            base = self.count
            parents = np.array([node if above < 0 else base + above for above in subtree.parent], np.int64)
            given = np.minimum(np.array(subtree.log_prob, np.float64), 0.0)
            self._append(parents, np.array(subtree.token, np.int64), given, source)
            place |= {index: base + index for index in range(len(subtree.token))}
        else:
            assert blend is not None, "two sources at one node take a blend"
            for above, below in groups.items():
                tokens = np.array([subtree.token[index] for index in below], np.int64)
                given = np.minimum(np.array([subtree.log_prob[index] for index in below], np.float64), 0.0)
                nodes = self._merge(place[above], tokens, given, source, blend)
                place |= zip(below, nodes, strict=True)
            self._rescore()
        for above in groups:
            self.asked[source, place[above]] = True

    def force(self, node: int, tokens: Sequence[int]) -> int:
        """Append a chain of tokens that the target must choose below a node; its last node.

        Some may be there already, as a source has guessed them.
        """
        guessed = False
        for token in tokens:
            below = self.children(node)
            self.settled[node] = True
            if len(below):
                assert self.token[below].tolist() == [token], "nothing stands beside the only token"
                guessed, node = True, int(below[0])
                self._given[node] = 0.0
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
        """New nodes [n], parents among them before their children; source: who guessed them, if one did."""
        start, end = self.count, self.count + len(parents)
        while end > len(self.token):
            for name in self._COLUMNS:
                kept = getattr(self, name)
                fresh = np.full_like(kept, np.nan if name == "said" else 0)
                setattr(self, name, np.concatenate([kept, fresh], axis=-1))
        self.token[start:end] = tokens
        self.parent[start:end] = parents
        self._given[start:end] = given
        if source is not None:
            self.said[source, start:end] = given
        self._crowded[parents] = True
        self.count = end
        inner = np.flatnonzero(parents >= start)  # below one another, as in a subtree
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
        blend: Blended,
    ) -> list[int]:
        """The nodes of these children [K] of one node, old and new; scores are left to `_rescore`."""
        siblings = self.children(parent)
        if self.settled[parent]:
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
            spoke: NDArray[np.bool_] = np.logical_not(np.isnan(self.said[:, siblings]).all(axis=1))
            spoke[source] = True
            said: NDArray[np.float32] = self.said[:, every]
            self.said[:, every] = np.where(spoke[:, None] & np.isnan(said), np.float32(-np.inf), said)
            self.said[source, nodes] = given
            self._given[every] = np.minimum(blend.combine(self.said[:, every]), 0.0)
        return nodes

    def _rescore(self) -> None:
        for nodes in self._levels(1):
            self.score[nodes] = self.score[self.parent[nodes]] + self._given[nodes]

    def _levels(self, first: int) -> Iterator[NDArray[np.int64]]:
        """The nodes of each level from this one on."""
        depth = self.depth[: self.count]
        order = np.argsort(depth, kind="stable")
        ends = np.searchsorted(depth[order], np.arange(first, int(depth.max()) + 2))
        for start, end in pairwise(ends.tolist()):
            yield order[start:end]

    def below(self, node: int, source: int = 0) -> "tuple[GrowingTree, NDArray[np.int64]]":
        """What one source guessed below a node, as a tree of its own whose root that is, and its nodes here.

        What other sources said is left out: they know more of the text when it is the root's turn.
        """
        said = self.said[source, : self.count]
        inside = np.zeros(self.count, np.bool_)
        inside[node] = True
        for nodes in self._levels(int(self.depth[node]) + 1):
            inside[nodes] = inside[self.parent[nodes]] & np.isfinite(said[nodes])
        kept = np.flatnonzero(inside)
        tree = GrowingTree(int(self.token[node]), len(self.said))
        tree.count = len(kept)
        for name in self._COLUMNS:
            fresh, fill = getattr(tree, name), np.nan if name == "said" else 0
            more = [(0, 0)] * (fresh.ndim - 1) + [(0, max(tree.count - fresh.shape[-1], 0))]
            setattr(tree, name, np.pad(fresh, more, constant_values=fill))
        place = np.full(self.count, NO_PARENT, np.int64)
        place[kept] = np.arange(len(kept))
        tree.token[: tree.count] = self.token[kept]
        tree.parent[1 : tree.count] = place[self.parent[kept[1:]]]
        tree.depth[: tree.count] = self.depth[kept] - self.depth[node]
        tree.said[source, 1 : tree.count] = said[kept[1:]]
        tree.asked[source, : tree.count] = self.asked[source, kept]
        tree._given[1 : tree.count] = np.minimum(said[kept[1:]], 0.0)
        tree._crowded[tree.parent[1 : tree.count]] = True
        tree._rescore()
        return tree, kept

    def children(self, node: int) -> NDArray[np.int64]:
        """The children of a node, the oldest first."""
        return np.flatnonzero(self.parent[: self.count] == node)

    def has_to_come(self, nodes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these nodes are the one thing that may follow their parents."""
        parents = self.parent[nodes]
        alone: NDArray[np.bool_] = self.settled[parents] & (parents != NO_PARENT)
        return alone

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
        """The subtree of the given ascending nodes.

        The source of a node is who thinks it likeliest, or the number of sources where it had to come.
        """
        place = np.full(self.count, NO_PARENT, dtype=np.int64)
        place[nodes] = np.arange(len(nodes))
        parent = np.where(self.parent[nodes] == NO_PARENT, NO_PARENT, place[self.parent[nodes]])
        said: NDArray[np.float32] = np.nan_to_num(self.said[:, nodes], nan=-np.inf)
        likeliest = said.argmax(axis=0) if len(said) else np.zeros(len(nodes), np.int64)
        return TokenTree(
            token=self.token[nodes].copy(),
            parent=parent,
            depth=self.depth[nodes].copy(),
            score=self.score[nodes].copy(),
            source=np.where(self.has_to_come(nodes), len(said), likeliest),
        )
