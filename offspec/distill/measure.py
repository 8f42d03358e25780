"""How well a head guesses text that it did not learn from.

Letters: D depths, K ranks, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from offspec.distill.store import Store
from offspec.distill.student import Pupil, read_lesson
from offspec.distill.time_limit import TimeLimit
from offspec_planners.sequoia import best_tree_shape

RANKS = 32
NODES = 64  # of the tree that figures are made for
_ROWS = 256  # rows whose logits over the whole vocabulary are there at once
_MOST = 6000  # tokens to measure with


@dataclass(frozen=True, slots=True)
class HeadAcceptance:
    """acceptance [D, K]: how often guess k at depth d was the next token, where those before it were right.

    rows: tokens it was measured on; nodes: of the tree that `expected` is of.
    """

    acceptance: NDArray[np.float64]
    rows: int
    nodes: int = NODES

    @property
    def first(self) -> tuple[float, ...]:
        """By depth how often the first guess was right."""
        return tuple(float(row[0]) for row in self.acceptance)

    @property
    def fifth(self) -> tuple[float, ...]:
        """By depth how often one of the first five was."""
        return tuple(float(row[:5].sum()) for row in self.acceptance)

    @property
    def expected(self) -> float:
        """Tokens per pass with the best tree of that size, the bonus token included."""
        if not self.rows:
            return 1.0
        return best_tree_shape(self.acceptance, self.nodes, len(self.acceptance)).expected


def measure_head(
    pupil: Pupil,
    store: Store,
    numbers: Sequence[int],
    device: torch.device,
    limit: TimeLimit,
    progress: Callable[[int], None],
) -> HeadAcceptance:
    """Ask a head about some passages, as many as there is time for. progress: takes how many are done."""
    hits, counts = np.zeros((pupil.depth, RANKS)), np.zeros(pupil.depth)
    with torch.no_grad():
        for done, number in enumerate(numbers):
            if counts[0] >= _MOST or (counts[0] and limit.left <= 0):
                break
            lesson = read_lesson(store, [number], device, whole=pupil.whole)
            for depth, scores in enumerate(pupil.guesses(lesson)):
                for logits, truth in zip(scores.logits.split(_ROWS), scores.truth.split(_ROWS), strict=True):
                    hits[depth] += _ranks(logits, lesson.tokens[truth])
                counts[depth] += len(scores.truth)
            progress(done + 1)
    return HeadAcceptance(hits / np.maximum(counts, 1)[:, None], int(counts[0]))


def _ranks(logits: torch.Tensor, truth: torch.Tensor) -> NDArray[np.float64]:
    """[K]: how often the truth [n] had each rank among logits [n, V]."""
    ranks = min(RANKS, logits.shape[1])
    hit = logits.topk(ranks, -1).indices == truth[:, None]
    found = np.zeros(RANKS)
    found[:ranks] = hit.sum(0).cpu().numpy()
    return found
