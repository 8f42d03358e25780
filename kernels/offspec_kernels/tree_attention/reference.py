"""Attention over a prefix and a token tree, written out in float64 with a dense mask."""

import torch
from torch import Tensor

from offspec_kernels.chunks import split_evenly
from offspec_kernels.tree_mask import TreeMask, Window

_SCORES = 1 << 20  # that are made at once: a GPU without triton has this path, too


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
    """See `tree_attention`. Scratch: keys and values in float64, and several times _SCORES numbers."""
    out.zero_()
    heads, key_heads = query.shape[1], key.shape[1]
    for tree, reach in enumerate(tree_mask.reaches()):
        k, v = (of[tree, :, : reach.keys].double() for of in (key, value))  # [KV, S, D] and [KV, S, E]
        for rows in split_evenly(0, reach.count, max(_SCORES // (heads * max(reach.keys, 1)), 1)):
            q = query[tree, :, rows].double().reshape(key_heads, -1, query.shape[3])  # [KV, G n, D]
            scores = (q @ k.transpose(1, 2) * scale).view(heads, -1, reach.keys)  # [H, n, S]
            if softcap:
                scores = torch.tanh(scores / softcap) * softcap
            seen = tree_mask.visible(tree, (rows.start, rows.stop), (0, reach.keys), window)
            if chosen is not None:
                few = seen.sum(dim=1, keepdim=True) <= chosen.shape[2]
                seen &= few | torch.zeros_like(seen).scatter(1, chosen[tree, rows].long(), True)
            scores = scores.masked_fill(~seen, float("-inf"))
            if sinks is not None:
                aside = sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
                scores = torch.cat([scores, aside], dim=2)
            weights = torch.softmax(scores, dim=2)[:, :, : reach.keys].reshape(key_heads, -1, reach.keys)
            out[tree, :, rows] = (weights @ v).view(heads, -1, value.shape[3]).to(out.dtype)
