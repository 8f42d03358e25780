"""The truth: float64, rounded to float32 where the scores are defined so, and a stable sort of each row."""

import math

import torch
from torch import Tensor

from offspec_kernels.gumbel_argmax.rows import Picks, Work


def pick(work: Work) -> Picks:
    """Scratch: six rows [V] of float64 or int64."""
    picks = [_row(work, row) for row in range(len(work.logits))]
    tokens, best, second = zip(*picks, strict=True)
    device = work.logits.device
    return Picks(
        torch.tensor(tokens, dtype=torch.int64, device=device),
        torch.tensor(best, dtype=torch.float32, device=device),
        torch.tensor(second, dtype=torch.float32, device=device),
    )


def _row(work: Work, row: int) -> tuple[int, float, float]:
    temperature = torch.tensor(work.temperature, dtype=torch.float32).double()
    scores = _rounded(work.logits[row].double() / temperature)
    ids = torch.arange(len(scores), device=scores.device)
    if work.least is not None:
        least = work.least[row].double()
        last = len(scores) if work.last_tie is None else work.last_tie[row]
        out = (scores < least) | ((scores == least) & (ids > last))
        scores[out] = -math.inf
    if work.positions is not None:
        noise = work.noise_row(work.positions[row])
        assert noise is not None
        scores = _rounded(scores + noise.double())
    ranked, order = torch.sort(scores, descending=True, stable=True)  # NaN first, then lower ids first
    second = float(ranked[1]) if len(ranked) > 1 else -math.inf
    return int(order[0]), float(ranked[0]), second


def _rounded(exact: Tensor) -> Tensor:
    """float64 as float32 would hold it; of one operation on two float32 this is what float32 would give."""
    return exact.float().double()
