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
from offspec_kernels.topk_children import BLOCK, topk_children
from offspec_planners.calibrate import Calibration


@dataclass(frozen=True, slots=True)
class Children:
    """The likeliest children of W nodes, best first: token, log_prob (calibrated), x (raw), [W, K] each."""

    token: NDArray[np.int64]
    log_prob: NDArray[np.float32]
    x: NDArray[np.float32]


class Scorer:
    """Turns a draft's logits into the probability that the target picks each token.

    x = the draft's processed logits (penalties, temperature; no filters, which would hide what the target
    may keep) plus the noise the target will add; softmax(x / tau), corrected by the calibration's table, is
    the estimate. noise is None for greedy decoding and for SpecExec's ranking. One buffer [W, V] is kept
    from step to step and worked on in place: fresh memory of that size costs several times what is computed
    in it.
    """

    def __init__(
        self,
        processor: LogitsProcessor,
        noise: GumbelNoise | None,
        calibration: Calibration,
        children: int = 32,
    ) -> None:
        self._processor = processor
        self._noise = noise
        self._children = children
        self.calibration = calibration
        self._room = torch.empty(0, 0)

    @property
    def needs_paths(self) -> bool:
        """Whether `children` looks at the paths it is given."""
        return self._processor.penalises

    def children(
        self,
        logits: torch.Tensor,
        paths: Sequence[Sequence[int]],
        positions: Sequence[int],
        depths: Sequence[int] = (0,),
    ) -> Children:
        """logits [W, V] at nodes with these paths below the root; positions [W] of the children.

        depths [W] of the nodes, or [1] of all of them; 0 is the root. The draft's V may be smaller than the
        target's: ids beyond it are never guessed. paths may be empty unless `needs_paths`.
        """
        size = self._processor.vocab_size
        room = self._buffer(len(logits), logits.device)
        scores = self._processor.draft_scores(logits, paths, out=room[:, :size])
        noise = self._noise
        found = topk_children(
            scores,
            min(self._children, size),
            seed=None if noise is None else noise.seed,
            positions=positions,
            tau=self.calibration.fit.tau,
            noise=None if noise is None else noise.row,
            room=room,
        )
        return Children(
            token=found.token.cpu().numpy(),
            log_prob=self.calibration.table.apply(found.log_prob.cpu().numpy(), depths),
            x=found.relative.cpu().numpy(),
        )

    def _buffer(self, count: int, device: torch.device) -> torch.Tensor:
        """[W, V in whole blocks], as `topk_children` wants its room."""
        if len(self._room) < count or self._room.device != device:
            blocks = -(-self._processor.vocab_size // BLOCK)
            self._room = torch.empty(count, blocks * BLOCK, device=device)
        return self._room[:count]


class Drafter(Protocol):
    """A source of guesses with a memory of the committed tokens."""

    name: str

    def start(self, ids: Sequence[int]) -> None:
        """Catch up with the committed ids, the last of which is the root of the tree to come."""

    def expand(self, candidates: Candidates, nodes: Sequence[int], scorer: Scorer) -> Children:
        """The children of `nodes`, whose parents have all been expanded before."""

    def commit(self, nodes: Sequence[int]) -> None:
        """The target accepted this path of candidates, from the root on."""

    def adopt(self) -> None:
        """Take over what the target knows of the committed ids, where the two can share it."""

    def rewind(self, length: int) -> None:
        """Forget everything behind the first `length` committed ids."""

    def close(self) -> None:
        """Free what the drafter holds."""
