"""Recurrences and short convolutions along a tree, compared with torch operations with a state per node.

Notation: T rows, H heads, G key heads, D key size, E value size, C channels, K taps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.cases import OURS, Case, Op, Setting, Spec, rms_ratio
from offspec_kernels.backend import Backend
from offspec_kernels.tree_conv import tree_conv
from offspec_kernels.tree_scan import traversal_order, tree_scan

TORCH = "torch"
_CLOSE = 1e-4  # error of float32 sums, relative to the result
_OPERATIONS = 7  # per state element and row: decayed, read twice, and updated


def parents_of(rows: int) -> list[int]:
    """Return the parents of a bushy tree, as in the attention's cases."""
    return [(row - 1) // 2 + row // 4 if row else -1 for row in range(rows)]


def build_scan(spec: Spec, setting: Setting) -> Case:
    """Build a case of the gated delta rule with one decay per head."""
    rows, heads, groups, size, width = spec.sizes
    query, key = (
        F.normalize(setting.random(rows, groups, size, seed=seed), dim=-1).to(spec.kind) for seed in (1, 2)
    )
    value, state = (
        setting.random(rows, heads, width).to(spec.kind),
        setting.random(heads, size, width, seed=5),
    )
    decay = -setting.random(rows, heads, seed=3).abs()
    beta = setting.random(rows, heads, seed=4).sigmoid()
    parents = parents_of(rows)
    order = traversal_order(parents)

    def scan(path: Backend | None) -> Tensor:
        out = tree_scan(key, value, decay, state, order, query=query, beta=beta, path=path)
        assert out is not None
        return out

    def by_levels() -> Tensor:
        """Process all rows of a depth at once, with a state for each of them."""
        k, q = (of.float().repeat_interleave(heads // groups, 1) for of in (key, query))
        v, keep, out = value.float(), decay.exp()[:, :, None, None], value.new_empty(value.shape).float()
        level, states = [row for row in range(rows) if parents[row] < 0], state[None]
        place = {-1: 0}
        while level:
            now = states[[place[parents[row]] for row in level]] * keep[level]
            lacks = v[level] - torch.einsum("nhde,nhd->nhe", now, k[level])
            now += k[level][..., None] * (beta[level][..., None] * lacks)[:, :, None]
            out[level] = torch.einsum("nhde,nhd->nhe", now, q[level])
            states, place = now, {row: index for index, row in enumerate(level)}
            level = [row for row in range(rows) if parents[row] in place]
        return out

    return Case(
        flops=float(_OPERATIONS * rows * heads * size * width),
        nbytes=sum(of.nbytes for of in (query, key, value, decay, beta, state)) + 4 * value.numel(),
        ways={OURS: lambda: scan(setting.path), **({TORCH: by_levels} if setting.rivals else {})},
        reference=lambda: scan("reference"),
        error=rms_ratio,
        limit=_CLOSE,
    )


def build_conv(spec: Spec, setting: Setting) -> Case:
    """Build a case in which each row convolves its path, preceded by K - 1 rows of the text."""
    rows, channels, taps = spec.sizes
    inputs = setting.random(rows + taps - 1, channels).to(spec.kind)
    weight = setting.random(channels, taps, seed=1).to(spec.kind)
    windows = list[list[int]]()
    for row, parent in enumerate(parents_of(rows)):
        before = windows[parent][1:] if row else list(range(taps - 1))
        windows.append([*before, row + taps - 1])
    window = torch.tensor(windows, device=setting.device)

    def conv(path: Backend | None) -> Tensor:
        return tree_conv(inputs, window, weight, path=path)

    def gathered() -> Tensor:
        return torch.einsum("tkc,ck->tc", inputs.float()[window], weight.float())

    return Case(
        flops=float(2 * rows * channels * taps),
        nbytes=inputs.nbytes + weight.nbytes + window.nbytes + 4 * rows * channels,
        ways={OURS: lambda: conv(setting.path), **({TORCH: gathered} if setting.rivals else {})},
        reference=lambda: conv("reference"),
        error=rms_ratio,
        limit=_CLOSE,
    )


OPS = {
    "tree_scan": Op(("T", "H", "G", "D", "E"), {"T": 30}, build_scan, lambda: tree_scan),
    "tree_conv": Op(("T", "C", "K"), {"T": 30}, build_conv, lambda: tree_conv),
}
