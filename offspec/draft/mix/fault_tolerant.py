"""Fault-tolerant wrappers: a failing source loses only its own proposals, since the target decides without
them.

A source that raises, or proposes invalid children (NaN, wrong shapes, tokens that do not exist), is disabled
for the rest of the request, with one notice. The next request tries it again, from an empty state.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from offspec.draft.base import Children, Drafter, Features, Lookup, Scorer
from offspec.draft.forward import BatchableDrafter, Expansion, expand_steps
from offspec.draft.growing_tree import GrowingTree, Subtree
from offspec.draft.lm import LMDrafter, ahead_drafter
from offspec.model.cache import TreeCache
from offspec.sampling.noise import GumbelNoise

_Found = TypeVar("_Found")


class _FaultTolerantSource:
    """Common guard of drafters and lookups. Only `Exception` disables a source: interrupts and halts
    propagate.
    """

    def __init__(self, name: str, source: Drafter | Lookup) -> None:
        self.name = name
        self._source, self._retired = source, False
        self._tell: Callable[[str], None] = lambda text: None

    def start_request(self, notify: Callable[[str], None]) -> None:
        """Start a request. notify: receives the reason if the source is disabled."""
        self._retired, self._tell = False, notify

    def _call_guarded(self, call: Callable[[], _Found], otherwise: _Found) -> _Found:
        if self._retired:
            return otherwise
        try:
            return call()
        except Exception as error:
            self._disable(error)
            return otherwise

    def _disable(self, error: Exception) -> None:
        self._retired = True
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        self._tell(f"{self.name} does not draft for the rest of this answer ({why})")
        try:
            self._source.rewind(0)  # drop whatever the failure left half-done
        except Exception:
            return

    def rewind(self, length: int) -> None:
        self._call_guarded(lambda: self._source.rewind(length), None)

    def close(self) -> None:
        self._source.close()


class FaultTolerantDrafter(_FaultTolerantSource, BatchableDrafter):
    """A drafter that may fail."""

    def __init__(self, name: str, drafter: Drafter) -> None:
        super().__init__(name, drafter)
        self._drafter, self.required_states = drafter, drafter.required_states

    def fork(self, target: TreeCache) -> "FaultTolerantDrafter":
        return FaultTolerantDrafter(self.name, self._drafter.fork(target))

    def set_cancel_check(self, check_cancelled: Callable[[], None] | None) -> None:
        self._drafter.set_cancel_check(check_cancelled)

    def start(self, ids: Sequence[int]) -> None:
        self._call_guarded(lambda: self._drafter.start(ids), None)

    def expand_steps(self, candidates: GrowingTree, nodes: Sequence[int], scorer: Scorer) -> Expansion:
        """Expand the nodes; an error of a forward is thrown in and counts as this drafter's failure."""
        if not self._retired:
            try:
                children = yield from expand_steps(self._drafter, candidates, nodes, scorer)
                _check_children(children, len(nodes), scorer.vocab_size)
                return children
            except Exception as error:
                self._disable(error)
        return Children.none(len(nodes))

    @property
    def ahead_drafter(self) -> LMDrafter | None:
        """The drafter, if it can expand nodes during a pass."""
        return None if self._retired else ahead_drafter(self._drafter)

    def draft_ahead(self, candidates: GrowingTree, nodes: Sequence[int], scorer: Scorer) -> Children:
        """Run `expand` in another thread. Raises the drafter's exceptions, which must be passed to `fail`."""
        children = self._drafter.expand(candidates, nodes, scorer)
        _check_children(children, len(nodes), scorer.vocab_size)
        return children

    def fail(self, error: Exception) -> None:
        """Record a failure that happened in another thread."""
        self._disable(error)

    def commit(self, nodes: Sequence[int]) -> None:
        self._call_guarded(lambda: self._drafter.commit(nodes), None)

    def commit_and_keep(self, nodes: Sequence[int], below: Mapping[int, int]) -> None:
        if (drafter := self.ahead_drafter) is not None:
            self._call_guarded(lambda: drafter.commit_and_keep(nodes, below), None)

    def resume(self, ids: Sequence[int]) -> None:
        if (drafter := self.ahead_drafter) is not None:
            self._call_guarded(lambda: drafter.resume(ids), None)

    def observe(self, features: Features) -> None:
        self._call_guarded(lambda: self._drafter.observe(features), None)

    def adopt_target_cache(self) -> None:
        self._call_guarded(self._drafter.adopt_target_cache, None)


class FaultTolerantLookup(_FaultTolerantSource):
    """A lookup that may fail."""

    def __init__(self, name: str, lookup: Lookup) -> None:
        super().__init__(name, lookup)
        self._lookup = lookup

    def fork(self) -> "FaultTolerantLookup":
        return FaultTolerantLookup(self.name, self._lookup.fork())

    def start(self, ids: Sequence[int]) -> None:
        self._call_guarded(lambda: self._lookup.start(ids), None)

    def continuations(
        self, path: Sequence[int], noise: GumbelNoise | None, most: int, floor: float, max_depth: int
    ) -> Subtree:
        def continuations() -> Subtree:
            subtree = self._lookup.continuations(path, noise, most, floor, max_depth)
            _check_subtree(subtree)
            return subtree

        return self._call_guarded(continuations, Subtree((), (), ()))

    def learn(self, tokens: Sequence[int]) -> None:
        self._call_guarded(lambda: self._lookup.learn(tokens), None)


def _check_children(children: Children, count: int, vocabulary: int) -> None:
    """Raise ValueError unless `children` is valid for `count` nodes."""
    shape = children.token.shape
    if len(shape) != 2 or shape[0] != count or not shape == children.log_prob.shape == children.x.shape:
        raise ValueError(f"children of {count} nodes have the shape {shape}")
    if np.isnan(children.log_prob).any():
        raise ValueError("a probability is not a number")
    if shape[1] and not (children.token.min() >= 0 and children.token.max() < vocabulary):
        raise ValueError("a token is not in the vocabulary")


def _check_subtree(subtree: Subtree) -> None:
    """Raise ValueError unless `subtree` can be added to a tree."""
    if not len(subtree.parent) == len(subtree.token) == len(subtree.log_prob):
        raise ValueError("a subtree's columns differ in length")
    if any(not -1 <= parent < node for node, parent in enumerate(subtree.parent)):
        raise ValueError("a node stands before its parent")
    if np.isnan(np.asarray(subtree.log_prob, np.float64)).any():
        raise ValueError("a probability is not a number")
