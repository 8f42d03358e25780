"""What every source of guesses has in common.

Letters: W nodes expanded together, K children of each, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from offspec.noise import GumbelNoise
from offspec.sampling import LogitsProcessor
from offspec.tree import Candidates
from offspec_planners.calibrate import TemperatureFit


@dataclass(frozen=True, slots=True)
class Children:
    """The likeliest children of W nodes, best first: token, log_prob (calibrated), x (raw), [W, K] each."""

    token: NDArray[np.int64]
    log_prob: NDArray[np.float32]
    x: NDArray[np.float32]


class Scorer:
    """Turns a draft's logits into the probability that the target picks each token.

    x = the draft's processed logits (penalties, temperature; no filters, which would hide what the target
    may keep) plus the noise the target will add; softmax(x / tau) is the estimate. noise is None for
    greedy decoding and for SpecExec's ranking.
    """

    def __init__(
        self, processor: LogitsProcessor, noise: GumbelNoise | None, fit: TemperatureFit, children: int = 32
    ) -> None:
        self._processor = processor
        self._noise = noise
        self._children = children
        self.fit = fit

    def children(
        self, logits: torch.Tensor, paths: Sequence[Sequence[int]], positions: Sequence[int]
    ) -> Children:
        """logits [W, V] at nodes with these paths below the root; positions [W] of the children."""
        missing = self._processor.vocab_size - logits.shape[1]
        if (
            missing
        ):  # heads of one family are padded to different sizes; ids beyond the draft's are never guessed
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        x = self._processor.draft_scores(logits, paths)
        if self._noise is not None:
            x = x + self._noise.rows(positions)
        count = min(self._children, x.shape[1])
        top, token = torch.topk(x, count, dim=1)
        tau = self.fit.tau
        total = torch.logsumexp(x if tau == 1.0 else x / tau, dim=1, keepdim=True)
        return Children(
            token=token.cpu().numpy(),
            log_prob=(top / tau - total).cpu().numpy(),
            x=(top - top[:, :1]).cpu().numpy(),
        )


class Drafter(Protocol):
    """A source of guesses with a memory of the committed tokens."""

    name: str

    def start(self, ids: Sequence[int]) -> None:
        """Catch up with the committed ids, the last of which is the root of the tree to come."""

    def expand(self, candidates: Candidates, nodes: Sequence[int], scorer: Scorer) -> Children:
        """The children of `nodes`, whose parents have all been expanded before."""

    def commit(self, nodes: Sequence[int]) -> None:
        """The target accepted this path of candidates, from the root on."""

    def rewind(self, length: int) -> None:
        """Forget everything behind the first `length` committed ids."""

    def close(self) -> None:
        """Free what the drafter holds."""
