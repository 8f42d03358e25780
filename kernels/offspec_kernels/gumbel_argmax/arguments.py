"""Arguments and results of the backends."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from offspec_kernels.noise import gumbel_row


class ArgmaxResult(NamedTuple):
    """Sampled tokens of N rows: token [N] int64, best [N] float32 and second [N] float32."""

    token: Tensor
    best: Tensor
    second: Tensor


def empty_result(count: int, device: torch.device) -> ArgmaxResult:
    """Allocate results for `count` rows."""
    best, second = torch.empty(2, count, device=device)
    return ArgmaxResult(torch.empty(count, dtype=torch.int64, device=device), best, second)


class ArgmaxArguments(NamedTuple):
    """Checked arguments of `gumbel_argmax`; positions is None if no noise is added."""

    logits: Tensor
    seed: int | None
    positions: Sequence[int] | None
    temperature: float
    min_score: Tensor | None
    last_tie: Tensor | None
    noise: Callable[[int], Tensor] | None
    table: Tensor | None = None

    def rows_by_position(self) -> list[tuple[int | None, list[int]]]:
        """Group rows by the position of their noise; without noise, all rows have position None."""
        if self.positions is None:
            return [(None, list(range(len(self.logits))))]
        rows: dict[int, list[int]] = {}
        for row, position in enumerate(self.positions):
            rows.setdefault(position, []).append(row)
        return list(rows.items())

    def noise_row(self, position: int | None) -> Tensor | None:
        """Return the noise row [V] float32, shared with the caller; None without noise."""
        if position is None:
            return None
        if self.noise is not None:
            return self.noise(position)
        assert self.seed is not None
        return gumbel_row(self.seed, position, self.logits.shape[1], self.logits.device)


def mask_below(scores: Tensor, least: Tensor, last_tie: Tensor | None) -> Tensor:
    """Set scores below `least`, and ties with late ids, to -inf in place and return the scores.

    scores [V] float32; least [1] or [] float32; last_tie [1] or [] int64: of scores equal to `least`, ids
    above it are late; None if no tie is late.
    """
    out = scores < least
    if last_tie is not None:
        out |= (scores == least) & (torch.arange(len(scores), device=scores.device) > last_tie)
    return scores.masked_fill_(out, -math.inf)
