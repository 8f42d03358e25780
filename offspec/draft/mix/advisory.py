"""Sources whose failures cost their own proposals and nothing else: the target decides without them.

A source that raises, or proposes what cannot be (NaN, other shapes, tokens that do not exist), is retired for
the rest of the request, with one notice. The next request tries it again, from an empty memory.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from offspec.draft.base import Children, Drafter, Features, Lookup, Scorer
from offspec.draft.forward import Expansion, Joinable, expanding
from offspec.draft.growing_tree import GrowingTree, Subtree
from offspec.draft.lm import LMDrafter, foreseeing
from offspec.model.cache import TreeCache
from offspec.sampling.noise import GumbelNoise

_Found = TypeVar("_Found")


class _Advisory:
    """What guards drafters and lookups alike. Only `Exception` retires: interrupts and halts go on up."""

    def __init__(self, name: str, source: Drafter | Lookup) -> None:
        self.name = name
        self._source, self._retired = source, False
        self._tell: Callable[[str], None] = lambda text: None

    def begin(self, tell: Callable[[str], None]) -> None:
        """A request begins. tell: hears why the source was retired, if it is."""
        self._retired, self._tell = False, tell

    def _ask(self, call: Callable[[], _Found], otherwise: _Found) -> _Found:
        if self._retired:
            return otherwise
        try:
            return call()
        except Exception as error:
            self._retire(error)
            return otherwise

    def _retire(self, error: Exception) -> None:
        self._retired = True
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        self._tell(f"{self.name} does not draft for the rest of this answer ({why})")
        try:
            self._source.rewind(0)  # whatever the failure left half done
        except Exception:
            return

    def rewind(self, length: int) -> None:
        self._ask(lambda: self._source.rewind(length), None)

    def close(self) -> None:
        self._source.close()


class AdvisoryDrafter(_Advisory, Joinable):
    """A drafter that may fail."""

    def __init__(self, name: str, drafter: Drafter) -> None:
        super().__init__(name, drafter)
        self._drafter, self.wants = drafter, drafter.wants

    def fork(self, target: TreeCache) -> "AdvisoryDrafter":
        return AdvisoryDrafter(self.name, self._drafter.fork(target))

    def watch(self, look: Callable[[], None] | None) -> None:
        self._drafter.watch(look)

    def start(self, ids: Sequence[int]) -> None:
        self._ask(lambda: self._drafter.start(ids), None)

    def expanding(self, candidates: GrowingTree, nodes: Sequence[int], scorer: Scorer) -> Expansion:
        """A forward that fails is thrown in, and is this drafter's failure."""
        if not self._retired:
            try:
                children = yield from expanding(self._drafter, candidates, nodes, scorer)
                _check_children(children, len(nodes), scorer.vocab_size)
                return children
            except Exception as error:
                self._retire(error)
        return Children.none(len(nodes))

    @property
    def foresees(self) -> LMDrafter | None:
        """The drafter, if it can expand nodes beside a pass."""
        return None if self._retired else foreseeing(self._drafter)

    def foresee(self, candidates: GrowingTree, nodes: Sequence[int], scorer: Scorer) -> Children:
        """`expand` for another thread: raises what the drafter raises, for `fail` to be told of."""
        children = self._drafter.expand(candidates, nodes, scorer)
        _check_children(children, len(nodes), scorer.vocab_size)
        return children

    def fail(self, error: Exception) -> None:
        """It failed in another thread."""
        self._retire(error)

    def commit(self, nodes: Sequence[int]) -> None:
        self._ask(lambda: self._drafter.commit(nodes), None)

    def commit_with(self, nodes: Sequence[int], below: Mapping[int, int]) -> None:
        if (drafter := self.foresees) is not None:
            self._ask(lambda: drafter.commit_with(nodes, below), None)

    def resume(self, ids: Sequence[int]) -> None:
        if (drafter := self.foresees) is not None:
            self._ask(lambda: drafter.resume(ids), None)

    def observe(self, features: Features) -> None:
        self._ask(lambda: self._drafter.observe(features), None)

    def adopt(self) -> None:
        self._ask(self._drafter.adopt, None)


class AdvisoryLookup(_Advisory):
    """A lookup that may fail."""

    def __init__(self, name: str, lookup: Lookup) -> None:
        super().__init__(name, lookup)
        self._lookup = lookup

    def fork(self) -> "AdvisoryLookup":
        return AdvisoryLookup(self.name, self._lookup.fork())

    def start(self, ids: Sequence[int]) -> None:
        self._ask(lambda: self._lookup.start(ids), None)

    def below(
        self, path: Sequence[int], noise: GumbelNoise | None, most: int, floor: float, max_depth: int
    ) -> Subtree:
        def below() -> Subtree:
            subtree = self._lookup.below(path, noise, most, floor, max_depth)
            _check_subtree(subtree)
            return subtree

        return self._ask(below, Subtree((), (), ()))

    def learn(self, tokens: Sequence[int]) -> None:
        self._ask(lambda: self._lookup.learn(tokens), None)


def _check_children(children: Children, count: int, vocabulary: int) -> None:
    """Raises ValueError for what no drafter may say of `count` nodes."""
    shape = children.token.shape
    if len(shape) != 2 or shape[0] != count or not shape == children.log_prob.shape == children.x.shape:
        raise ValueError(f"children of {count} nodes have the shape {shape}")
    if np.isnan(children.log_prob).any():
        raise ValueError("a probability is not a number")
    if shape[1] and not (children.token.min() >= 0 and children.token.max() < vocabulary):
        raise ValueError("a token is not in the vocabulary")


def _check_subtree(subtree: Subtree) -> None:
    """Raises ValueError for one that no tree can take up."""
    if not len(subtree.parent) == len(subtree.token) == len(subtree.log_prob):
        raise ValueError("a subtree's columns differ in length")
    if any(not -1 <= parent < node for node, parent in enumerate(subtree.parent)):
        raise ValueError("a node stands before its parent")
    if np.isnan(np.asarray(subtree.log_prob, np.float64)).any():
        raise ValueError("a probability is not a number")
