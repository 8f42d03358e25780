"""The likeliest children by sorting whole rows."""

from collections.abc import Sequence

import torch
from torch import Tensor


def children(
    logits: Tensor,
    count: int,
    noise: Sequence[Tensor] | None,
    tau: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """token, relative and log_prob of `topk_children`; noise: the row [V] to add to each."""
    x = logits.float()  # the order is that of float32, rounded as the noise is added; the rest is float64
    if noise is not None:
        x = x + torch.stack(list(noise))
    best, token = (found[:, :count] for found in torch.sort(x, dim=1, descending=True, stable=True))
    exact = best.double()
    log_sum = torch.logsumexp((x.double() - exact[:, :1]) / tau, dim=1, keepdim=True)
    relative = exact - exact[:, :1]
    return token, relative.float(), (relative / tau - log_sum).float()
