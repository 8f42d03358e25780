"""A language model as drafter: one forward for the W nodes of a step, over its own tree cache."""

import copy
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Self

import torch

from offspec.draft.base import Children, Drafter, Scorer, score
from offspec.draft.cache_rows import TreeRows
from offspec.draft.forward import DraftModel, Expansion, Forward, Joinable
from offspec.draft.growing_tree import GrowingTree
from offspec.model.attention import TreeContext
from offspec.model.cache import TreeCache
from offspec.model.fused.cache import LeanCache
from offspec.model.pass_parts import SequenceRows


class LMDrafter(Joinable):
    """Drafts with a causal LM that shares the target's vocabulary.

    Rows of its cache behind the committed ones belong to expanded nodes, in the order of expansion; the
    tokens committed since the last pass run together with the root.

    target: the cache of a target that the draft is a rounding of. Its keys and values take the place of the
    draft's own once they are committed (as in SubSpec, arXiv 2509.18344): they are nearer to what the target
    will look back on, and guesses get better by that. While a tree grows the draft looks at its own rows.
    """

    def __init__(
        self,
        name: str,
        model: DraftModel,
        device: torch.device,
        release: Callable[[], None],
        target: TreeCache | None = None,
    ) -> None:
        self.name = name
        self._model = model
        self._device = device
        self._release = release
        self._begin(model.cache, target)

    def _begin(self, cache: TreeCache | LeanCache, target: TreeCache | None) -> None:
        """An empty text in this cache, and in that of its target."""
        self._cache, self._target = cache, target
        self._adopted = 0  # positions of the cache that are the target's
        self._ids: list[int] = []
        self._rows = TreeRows()
        self._pending = 0  # rows before the tree's: tokens committed since the cache was last committed
        self._positions: list[int] = []  # of the pending rows, then of the tree's

    def fork(self, target: TreeCache) -> Self:
        twin = copy.copy(self)
        twin._begin(self._cache.another(), None if self._target is None else target)
        twin._release = lambda: None  # it holds no weights
        return twin

    def watch(self, look: Callable[[], None] | None) -> None:
        self._model.between = look

    def start(self, ids: Sequence[int]) -> None:
        cache = self._cache
        cache.rewind(min(cache.length, len(ids) - 1))
        self._adopted = min(self._adopted, cache.length)
        self._ids = list(ids)
        self._rows.clear()

    def expanding(self, candidates: GrowingTree, nodes: Sequence[int], scorer: Scorer) -> Expansion:
        if not self.reaches(candidates, nodes):
            return Children.none(len(nodes))
        logits, position = yield from self.logits(candidates, nodes)
        return score(scorer, logits, candidates, nodes, len(self._ids) - 1, position + 1)

    def reaches(self, candidates: GrowingTree, nodes: Sequence[int]) -> bool:
        """Whether the draft has positions for these nodes: its context may be shorter than the target's."""
        last = len(self._ids) - 1 + int(candidates.depth[nodes].max())
        return last < self._model.skeleton.context_length

    def logits(
        self, candidates: GrowingTree, nodes: Sequence[int]
    ) -> Generator[Forward, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """What `expand` scores at nodes that are expanded by it: [W, V] of the draft's head, and [W] where
        the nodes stand."""
        cache, root = self._cache, len(self._ids) - 1
        fresh = self._ids[cache.length : root] if not self._rows else []
        if not self._rows:
            self._pending, self._positions = len(fresh), list(range(cache.length, root))
        self._rows.place(candidates, nodes)
        self._positions += (candidates.depth[nodes] + root).tolist()
        last = self._model.skeleton.vocab_size - 1  # the target's head may be padded beyond the draft's
        tokens, context = TreeContext.of_step(
            [min(token, last) for token in (*fresh, *candidates.token[nodes].tolist())],
            self._positions,
            self._rows.sees,
            prefix=cache.length,
            causal=self._pending,
            device=self._device,
            exact=False,
        )
        logits = yield Forward(self._model, SequenceRows(tokens, context, cache), len(nodes))
        return logits, context.position[-len(nodes) :]

    @property
    def foresees(self) -> bool:
        """See `foreseeing`. On a CPU alone, and not where rows carry a state or give way to the target's."""
        own = isinstance(self._cache, LeanCache) and self._target is None
        return own and self._device.type == "cpu"

    @property
    def spare(self) -> int:
        """Nodes that there is room for in memory that it holds anyway."""
        assert isinstance(self._cache, LeanCache)
        return self._cache.capacity - self._cache.filled

    def commit(self, nodes: Sequence[int]) -> None:
        rows = self._rows.of(nodes)
        if rows:
            self._cache.commit(self._pending, rows)

    def commit_with(self, nodes: Sequence[int], below: Mapping[int, int]) -> None:
        """`commit`, keeping what was computed at some nodes below the path.

        below: of nodes that were expanded the next root and those under it, with their numbers in its tree.
        """
        assert isinstance(self._cache, LeanCache)
        committed = self._rows.of(nodes)
        self._rows, rows = self._rows.below(below)
        positions = [self._positions[self._pending + row] for row in rows]
        self._cache.commit(self._pending, committed, rows)
        self._pending, self._positions = 0, positions

    def resume(self, ids: Sequence[int]) -> None:
        """`start` right behind `commit_with`: what was kept is below the last of these ids."""
        assert self._rows and self._cache.length == len(ids) - 1, "rows stand below another root"
        self._ids = list(ids)

    def adopt(self) -> None:
        if self._target is not None and self._target.length > self._adopted:
            self._cache.adopt(self._adopted, self._target.committed(self._adopted))
            if self._target.recurrences:
                self._cache.adopt_states(self._target)
            self._adopted = self._target.length

    def rewind(self, length: int) -> None:
        cache = self._cache
        cache.rewind(min(length, cache.length))
        self._adopted = min(self._adopted, cache.length)

    def close(self) -> None:
        self._begin(TreeCache(0, 0), None)
        self._release()


def foreseeing(drafter: Drafter) -> LMDrafter | None:
    """The drafter, if it may expand nodes of a tree while the target's pass is on its way, in another thread.

    It looks at nothing but rows of its own, and can keep those below the node that becomes the next root.
    """
    return drafter if isinstance(drafter, LMDrafter) and drafter.foresees else None
