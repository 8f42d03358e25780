"""What the paths are given and what they give back."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from offspec_kernels.noise import gumbel_row


class Picks(NamedTuple):
    """Of each of N rows: token [N] int64, best [N] float32 and second [N] float32."""

    token: Tensor
    best: Tensor
    second: Tensor


def empty_picks(count: int, device: torch.device) -> Picks:
    """Room for the picks of `count` rows."""
    best, second = torch.empty(2, count, device=device)
    return Picks(torch.empty(count, dtype=torch.int64, device=device), best, second)


class Work(NamedTuple):
    """The arguments of `gumbel_argmax`, checked. positions is None where no noise is added."""

    logits: Tensor
    seed: int | None
    positions: Sequence[int] | None
    temperature: float
    least: Tensor | None
    last_tie: Tensor | None
    noise: Callable[[int], Tensor] | None
    table: Tensor | None = None

    def rows_by_position(self) -> list[tuple[int | None, list[int]]]:
        """Rows that share their noise, for each position; all rows, of position None, where there is none."""
        if self.positions is None:
            return [(None, list(range(len(self.logits))))]
        rows: dict[int, list[int]] = {}
        for row, position in enumerate(self.positions):
            rows.setdefault(position, []).append(row)
        return list(rows.items())

    def noise_row(self, position: int | None) -> Tensor | None:
        """[V] float32, shared with the caller; None where there is none."""
        if position is None:
            return None
        if self.noise is not None:
            return self.noise(position)
        assert self.seed is not None
        return gumbel_row(self.seed, position, self.logits.shape[1], self.logits.device)


def keep_above(scores: Tensor, least: Tensor, last_tie: Tensor | None) -> Tensor:
    """Sets to -inf, in place, scores below `least`, and those that equal it and have late ids; returns them.

    scores [V] float32; least [1] or [] float32; last_tie [1] or [] int64: of scores equal to `least`, ids
    above it are late; None for none.
    """
    out = scores < least
    if last_tie is not None:
        out |= (scores == least) & (torch.arange(len(scores), device=scores.device) > last_tie)
    return scores.masked_fill_(out, -math.inf)
