"""A draft with a tokenizer of its own: it reads in its own tokens and guesses in the target's."""

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch

from offspec.draft.base import Children, Scorer, score
from offspec.draft.cross_vocab.retokenize import Reading
from offspec.draft.cross_vocab.vocab_map import UNKNOWN, VocabMap
from offspec.draft.forward import Expansion, Joinable
from offspec.draft.growing_tree import GrowingTree
from offspec.draft.lm import LMDrafter
from offspec.model.cache import TreeCache
from offspec.sampling.token_tree import ROOT


class TranslatedDrafter(Joinable):
    """Drafts with a causal LM of another vocabulary, by the tokens that both have (`VocabMap`).

    Nothing can be said below a token that the draft does not have, nor while the committed text ends in the
    midst of what the draft would read as one token.
    """

    def __init__(self, inner: LMDrafter, vocab: VocabMap, reading: Reading, device: torch.device) -> None:
        """device: of the draft's logits."""
        self.name = inner.name
        self._inner = inner
        self._vocab, self._device = vocab.on(device), device
        self._reading = reading
        self._root = 0  # the position of the root, as the target counts
        self._candidates: GrowingTree | None = None  # of the tree that grows
        self._lost: set[int] = set()  # nodes of it that the draft cannot stand at
        self._wide = torch.empty(0, 0)

    def watch(self, look: Callable[[], None] | None) -> None:
        self._inner.watch(look)

    def fork(self, target: TreeCache) -> "TranslatedDrafter":
        return TranslatedDrafter(self._inner.fork(target), self._vocab, self._reading.fork(), self._device)

    def start(self, ids: Sequence[int]) -> None:
        self._inner.rewind(self._reading.follow(ids))
        if self._reading.told:
            self._inner.start(self._reading.ids)
        self._root = len(ids) - 1
        self._candidates = None
        self._lost.clear()

    def expanding(self, candidates: GrowingTree, nodes: Sequence[int], scorer: Scorer) -> Expansion:
        self._candidates = candidates
        rows = self._rows(candidates, nodes) if self._reading.told else []
        if not rows or not self._inner.reaches(candidates, nodes):
            return Children.none(len(nodes))
        logits, _ = yield from self._inner.logits(self._translated(candidates), [nodes[row] for row in rows])
        found = score(scorer, self._widened(logits, rows, len(nodes)), candidates, nodes, self._root)
        found.log_prob[[row for row in range(len(nodes)) if row not in rows]] = -np.inf
        return found

    def _rows(self, candidates: GrowingTree, nodes: Sequence[int]) -> list[int]:
        """Which of the nodes the draft can stand at, with all that is above them."""
        same = self._vocab.translate(candidates.token[nodes])
        rows = list[int]()
        for row, (node, parent) in enumerate(zip(nodes, candidates.parent[nodes].tolist(), strict=True)):
            if node != ROOT and (same[row] == UNKNOWN or parent in self._lost):
                self._lost.add(node)
            else:
                rows.append(row)
        return rows

    def _translated(self, candidates: GrowingTree) -> GrowingTree:
        view = copy.copy(candidates)
        view.token = self._vocab.translate(candidates.token)
        view.token[ROOT] = self._reading.ids[-1]
        return view

    def _widened(self, logits: torch.Tensor, rows: Sequence[int], count: int) -> torch.Tensor:
        """The draft's logits of some of W rows, [n, D], as those of the target, [W, T].

        In a buffer, in which what the draft lacks is -inf from the beginning. So are rows that are not named.
        """
        if len(rows) < count:
            some, logits = logits, logits.new_full((count, logits.shape[1]), -torch.inf)
            logits[rows] = some
        if len(self._wide) < count:
            self._wide = logits.new_full((count, len(self._vocab.draft_of)), -torch.inf)
        return self._vocab.scatter(logits, self._wide[:count])

    def commit(self, nodes: Sequence[int]) -> None:
        if self._candidates is None:
            return  # it was not asked, and will read what was said
        if self._reading.told:
            self._inner.commit(nodes)
        self._reading.say(self._candidates.token[nodes[1:]].tolist())

    def rewind(self, length: int) -> None:
        pass  # `start` compares, and can keep more: a prompt that is asked again need not be read again

    def close(self) -> None:
        self._inner.close()
