"""A language model as drafter: one forward for the W nodes of a step, over its own tree cache."""

import copy
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Self

import torch

from offspec.draft.base import Children, Drafter, Scorer, score_children
from offspec.draft.cache_rows import TreeRows
from offspec.draft.forward import BatchableDrafter, DraftModel, Expansion, Forward
from offspec.draft.growing_tree import GrowingTree
from offspec.model.attention import TreeContext
from offspec.model.cache import TreeCache
from offspec.model.fused.cache import FusedCache
from offspec.model.pass_parts import SequenceRows


class LMDrafter(BatchableDrafter):
    """Drafts with a causal LM that shares the target's vocabulary.

    Cache rows after the committed ones belong to expanded nodes, in the order of expansion. Tokens committed
    since the last pass run together with the root.

    target: the cache of the target, if the draft is a quantized copy of it. The target's keys and values
    replace the draft's own once they are committed (as in SubSpec, arXiv 2509.18344): they are closer to the
    ones the target will attend to, which raises the acceptance rate. While a tree grows the draft attends to
    its own rows.
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

    def _begin(self, cache: TreeCache | FusedCache, target: TreeCache | None) -> None:
        """Start with an empty text in this cache and that of its target."""
        self._cache, self._target = cache, target
        self._adopted = 0  # cache positions taken from the target
        self._ids: list[int] = []
        self._rows = TreeRows()
        self._pending = 0  # rows before the tree's: tokens committed since the cache was last committed
        self._positions: list[int] = []  # of the pending rows, then of the tree's rows

    def fork(self, target: TreeCache) -> Self:
        twin = copy.copy(self)
        twin._begin(self._cache.empty_copy(), None if self._target is None else target)
        twin._release = lambda: None  # a fork owns no weights
        return twin

    def set_cancel_check(self, check_cancelled: Callable[[], None] | None) -> None:
        self._model.check_cancelled = check_cancelled

    def start(self, ids: Sequence[int]) -> None:
        cache = self._cache
        cache.rewind(min(cache.length, len(ids) - 1))
        self._adopted = min(self._adopted, cache.length)
        self._ids = list(ids)
        self._rows.clear()

    def expand_steps(self, candidates: GrowingTree, nodes: Sequence[int], scorer: Scorer) -> Expansion:
        if not self.fits_context(candidates, nodes):
            return Children.none(len(nodes))
        logits, position = yield from self.logits(candidates, nodes)
        return score_children(scorer, logits, candidates, nodes, len(self._ids) - 1, position + 1)

    def fits_context(self, candidates: GrowingTree, nodes: Sequence[int]) -> bool:
        """Return whether the nodes fit in the draft's context, which may be shorter than the target's."""
        last = len(self._ids) - 1 + int(candidates.depth[nodes].max())
        return last < self._model.skeleton.context_length

    def logits(
        self, candidates: GrowingTree, nodes: Sequence[int]
    ) -> Generator[Forward, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Compute the logits that `expand` scores: [W, V] of the draft's head, and the nodes' positions
        [W].
        """
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
    def can_draft_ahead(self) -> bool:
        """Whether `ahead_drafter` may use this drafter: on a CPU only, and not if rows carry a state or
        are replaced by the target's.
        """
        own = isinstance(self._cache, FusedCache) and self._target is None
        return own and self._device.type == "cpu"

    @property
    def spare(self) -> int:
        """Number of nodes that fit in the memory already allocated."""
        assert isinstance(self._cache, FusedCache)
        return self._cache.capacity - self._cache.filled

    def commit(self, nodes: Sequence[int]) -> None:
        rows = self._rows.of(nodes)
        if rows:
            self._cache.commit(self._pending, rows)

    def commit_and_keep(self, nodes: Sequence[int], below: Mapping[int, int]) -> None:
        """Commit the nodes and keep the computed rows of some nodes below the path.

        below: number in the next tree by expanded node, for the next root and nodes below it.
        """
        assert isinstance(self._cache, FusedCache)
        committed = self._rows.of(nodes)
        self._rows, rows = self._rows.subset(below)
        positions = [self._positions[self._pending + row] for row in rows]
        self._cache.commit(self._pending, committed, rows)
        self._pending, self._positions = 0, positions

    def resume(self, ids: Sequence[int]) -> None:
        """Start directly after `commit_and_keep`: the kept rows are below the last of these ids."""
        assert self._rows and self._cache.length == len(ids) - 1, "rows stand below another root"
        self._ids = list(ids)

    def adopt_target_cache(self) -> None:
        if self._target is not None and self._target.length > self._adopted:
            self._cache.append_committed(self._adopted, self._target.committed(self._adopted))
            if self._target.recurrences:
                self._cache.copy_states(self._target)
            self._adopted = self._target.length

    def rewind(self, length: int) -> None:
        cache = self._cache
        cache.rewind(min(length, cache.length))
        self._adopted = min(self._adopted, cache.length)

    def close(self) -> None:
        self._begin(TreeCache(0, 0), None)
        self._release()


def ahead_drafter(drafter: Drafter) -> LMDrafter | None:
    """Return the drafter if it can expand nodes in another thread while the target's pass runs, else None.

    Such a drafter reads only its own rows, and can keep those below the node that becomes the next root.
    """
    return drafter if isinstance(drafter, LMDrafter) and drafter.can_draft_ahead else None
