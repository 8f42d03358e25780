"""tree_attention compared with torch's fused attention with a dense mask, and with FlexAttention.

Notation: L prefix rows, N tree rows, S = L + N, H query heads, KV key heads, G = H / KV, D head size.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.cases import OURS, Case, Op, Setting, Spec, rms_ratio
from bench.kernels.timing import Call
from offspec_kernels.tree_attention import tree_attention
from offspec_kernels.tree_mask import TreeMask

NAMES = ("L", "N", "H", "KV", "D")
# Sizes of the check: small enough for the reference, and too large for a dense mask to be used (`eager`).
SMALL = {"L": 1500, "N": 200}
LIMITS = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 1e-2}
SDPA = "sdpa"  # prefix of the names of implementations that use it
FLEX = "flex"


def ancestor_mask(count: int, device: torch.device) -> Tensor:
    """Return [N, N] bool: the ancestors of each node in a tree where i's parent is (i - 1) // 2 + i // 4.

    The tree is bushy, and its depth grows with the logarithm of N, as in a draft tree.
    """
    sees = torch.eye(count, dtype=torch.bool)
    for node in range(1, count):
        sees[node] |= sees[(node - 1) // 2 + node // 4]
    return sees.to(device)


class Inputs:
    """Inputs of one pass: query [1, H, N, D], key and value [1, KV, S, D], and the ancestor mask."""

    def __init__(self, spec: Spec, setting: Setting) -> None:
        self.prefix, self.count, self.heads, self.key_heads, self.size = spec.sizes
        whole = self.prefix + self.count
        self.query = (setting.random(1, self.heads, self.count, self.size) * setting.spread).to(spec.kind)
        self.key, self.value = (
            setting.random(1, self.key_heads, whole, self.size, seed=seed).to(spec.kind) for seed in (1, 2)
        )
        self.visible = ancestor_mask(self.count, setting.device)
        self.tree_mask = TreeMask.of(self.visible, prefix=self.prefix)

    @property
    def groups(self) -> int:
        return self.heads // self.key_heads

    @property
    def pairs(self) -> int:
        """Number of pairs of a query and a key that it sees."""
        return self.count * self.prefix + int(self.visible.sum())

    @property
    def nbytes(self) -> int:
        """Bytes of queries, keys and values read once and of results written once."""
        return 2 * self.query.nbytes + self.key.nbytes + self.value.nbytes

    @property
    def mask_bytes(self) -> int:
        return self.count * (self.prefix + self.count) * self.query.itemsize

    def mask(self) -> Tensor:
        """Return a mask [N, S] in the queries' dtype: 0 if the query sees the key, else -inf."""
        seen = torch.cat([self.visible.new_ones(self.count, self.prefix), self.visible], dim=1)
        return torch.zeros(seen.shape, dtype=self.query.dtype, device=seen.device).masked_fill_(
            ~seen, float("-inf")
        )


def build(spec: Spec, setting: Setting) -> Case:
    given = Inputs(spec, setting)
    query, key, value, tree_mask = given.query, given.key, given.value, given.tree_mask
    ways: dict[str, Call] = {OURS: lambda: tree_attention(query, key, value, tree_mask, path=setting.path)}
    facts: dict[str, Any] = {"dense_mask_bytes": given.mask_bytes}
    if setting.rivals:
        ways |= _fused(given)
        if setting.device.type == "cuda":
            ways[FLEX] = _flexible(given, facts)
    return Case(
        flops=4.0 * given.heads * given.size * given.pairs,
        nbytes=given.nbytes,
        ways=ways,
        reference=lambda: tree_attention(query, key, value, tree_mask, path="reference"),
        error=rms_ratio,
        limit=LIMITS[spec.dtype],
        facts=facts,
    )


def _fused(given: Inputs) -> dict[str, Call]:
    """Return torch's attention in three ways, with masks and repeated keys prepared in advance."""
    query, key, value, mask = given.query, given.key, given.value, given.mask()
    attend = F.scaled_dot_product_attention
    ways: dict[str, Call] = {
        f"{SDPA}_gqa": lambda: attend(query, key, value, attn_mask=mask, enable_gqa=True)
    }
    if given.groups == 1:
        return ways
    folded = query.reshape(1, given.key_heads, given.groups * given.count, given.size)
    wide = mask.repeat(given.groups, 1)
    many_keys, many_values = (tensor.repeat_interleave(given.groups, dim=1) for tensor in (key, value))
    ways[f"{SDPA}_folded"] = lambda: attend(folded, key, value, attn_mask=wide).view(query.shape)
    ways[f"{SDPA}_repeated"] = lambda: attend(query, many_keys, many_values, attn_mask=mask)
    return ways


def _flexible(given: Inputs, facts: dict[str, Any]) -> Call:
    """Return compiled FlexAttention with a block mask, whose construction is compiled and timed separately.

    Everything happens in the first call, so a failure affects only this implementation, not the case.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    prefix, sees = given.prefix, given.visible

    def visible(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return (column < prefix) | sees[row, (column - prefix).clamp(min=0)]

    def make() -> Any:
        whole = prefix + given.count
        return create_block_mask(
            visible, None, None, given.count, whole, device=str(sees.device), _compile=True
        )

    @cache
    def blocks() -> Any:
        make()  # compiles
        torch.cuda.synchronize(sees.device)
        start = time.perf_counter()
        made = make()
        torch.cuda.synchronize(sees.device)
        facts["flex_mask_seconds"] = time.perf_counter() - start
        return made

    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(given.query, given.key, given.value, block_mask=blocks(), enable_gqa=True)


OP = Op(NAMES, SMALL, build, lambda: tree_attention)
