"""Attention over a prefix and a token tree, written out in float64 with a dense mask."""

import torch
from torch import Tensor

from offspec_kernels.tree_mask import TreeMask, Window


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree_mask: TreeMask,
    scale: float,
    window: Window | None,
    softcap: float | None,
    sinks: Tensor | None,
    out: Tensor,
    chosen: Tensor | None = None,
) -> None:
    """See `tree_attention`. Scratch: several times H N S float64, for one tree at a time."""
    out.zero_()
    groups = query.shape[1] // key.shape[1]
    for tree, reach in enumerate(tree_mask.reaches()):
        q = query[tree, :, : reach.count].double()
        k = key[tree, :, : reach.keys].double().repeat_interleave(groups, dim=0)
        v = value[tree, :, : reach.keys].double().repeat_interleave(groups, dim=0)
        scores = q @ k.transpose(1, 2) * scale  # [H, N, S]
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        seen = tree_mask.visible(tree, (0, reach.count), (0, reach.keys), window)
        if chosen is not None:
            few = seen.sum(dim=1, keepdim=True) <= chosen.shape[2]
            seen &= few | torch.zeros_like(seen).scatter(1, chosen[tree, : reach.count].long(), True)
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            aside = sinks.double()[:, None, None].expand(-1, reach.count, 1)
            scores = torch.cat([scores, aside], dim=2)
        weights = torch.softmax(scores, dim=2)[:, :, : reach.keys]
        out[tree, :, : reach.count] = (weights @ v).to(out.dtype)
