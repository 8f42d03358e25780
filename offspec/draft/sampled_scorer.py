"""Draft tokens that are sampled instead of ranked, for verification without replacement.

Sequoia's rule (`sampling.verify_sequoia`) is exact for children that were drawn one after the other from the
draft's distribution, none of them twice. Adding Gumbel noise to the scores and taking the largest few does
just that, best first (Gumbel top-k: Kool, van Hoof and Welling 2019, arXiv 1903.06059). The target never sees
this noise: children that knew the target's would not be draws from the draft's distribution.

Letters: W nodes expanded together, K children of each, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from offspec.draft.base import Children, Scorer
from offspec.sampling.logits_processor import LogitsProcessor
from offspec.sampling.noise import uniforms
from offspec_planners.acceptance import Calibration


class SamplingScorer(Scorer):
    """Draws the children of nodes from softmax(the draft's processed logits), without replacement.

    Every row of a request uses its own random numbers, so nodes at one position are sampled independently,
    and the same key reproduces the same draws. The scores are processed as in `Scorer`, without filters.
    Acceptance of a child depends on its rank in the order, so its log-probability is the calibration's for
    that rank.
    """

    def __init__(
        self, processor: LogitsProcessor, key: int, calibration: Calibration, children: int = 32
    ) -> None:
        super().__init__(processor, None, calibration, children)
        self._key = key
        self._rows = 0  # drawn for this request

    def children(
        self,
        logits: torch.Tensor,
        paths: Sequence[Sequence[int]],
        positions: Sequence[int],
        depths: Sequence[int] = (0,),
        device_positions: torch.Tensor | None = None,
    ) -> Children:
        """Return sampled children, in drawn order; `drawn_scores` holds the scores, on the logits' device.

        Arguments: see `Scorer.children`. A row with non-finite values offers no child. Memory: 4 W V bytes,
        kept with the children, and a few times 8 V.
        """
        size = self._processor.vocab_size
        scores = self._processor.draft_scores(
            logits, paths, out=torch.empty(len(logits), size, device=logits.device)
        )
        scores[~torch.isfinite(scores.amax(dim=1))] = -torch.inf
        count = min(self._children, size)
        drawn = [self._draw(row.cpu(), count) for row in scores]
        token = torch.stack([order for order, _ in drawn])
        possible = torch.stack([usable for _, usable in drawn]).numpy()
        accepted = np.log(self._acceptance(depths, count))
        return Children(
            token=token.numpy(),
            log_prob=np.where(possible, accepted, -np.inf).astype(np.float32),
            x=scores.gather(1, token.to(scores.device)).cpu().numpy(),
            drawn_scores=scores,
        )

    def _draw(self, scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample the next row from scores [V]: tokens [K] in drawn order, and which of them are possible."""
        chance = uniforms(self._key, "draw", self._rows, len(scores))
        self._rows += 1
        # In float64, so that the sum keeps all of the scores that the rule will be given.
        best = chance.log_().neg_().log_().neg_().add_(scores).topk(count)
        return best.indices, torch.isfinite(best.values)

    def _acceptance(self, depths: Sequence[int], count: int) -> NDArray[np.float64]:
        """Return the acceptance rate [W, K] by rank, or [1, K] for nodes of one depth."""
        table = self.calibration.acceptance()
        rows = np.minimum(np.asarray(depths, np.int64), len(table) - 1)
        return table[rows, :count]
