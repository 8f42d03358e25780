"""tree_attention beside torch's fused attention with a dense mask, and beside FlexAttention.

Letters: L prefix rows, N tree rows, S = L + N, H query heads, KV key heads, G = H / KV, D head size.
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
from bench.kernels.clock import Call
from offspec_kernels.tree_attention import tree_attention
from offspec_kernels.tree_mask import TreeMask

NAMES = ("L", "N", "H", "KV", "D")
# For the check: as small as the reference wants it, and too large for a mask to be worth its while (`eager`).
SMALL = {"L": 1500, "N": 200}
LIMITS = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 1e-2}
SDPA = "sdpa"  # what the rivals that use it are named after
FLEX = "flex"


def tree_sees(count: int, device: torch.device) -> Tensor:
    """[N, N] bool: who sees whom in a tree where node i hangs from node (i - 1) // 2 + i // 4.

    It is bushy, and its depth grows with the logarithm of N, as a tree of guesses has it.
    """
    sees = torch.eye(count, dtype=torch.bool)
    for node in range(1, count):
        sees[node] |= sees[(node - 1) // 2 + node // 4]
    return sees.to(device)


class Inputs:
    """One pass: query [1, H, N, D], key and value [1, KV, S, D], and who sees whom."""

    def __init__(self, spec: Spec, setting: Setting) -> None:
        self.prefix, self.count, self.heads, self.key_heads, self.size = spec.sizes
        whole = self.prefix + self.count
        self.query = (setting.random(1, self.heads, self.count, self.size) * setting.spread).to(spec.kind)
        self.key, self.value = (
            setting.random(1, self.key_heads, whole, self.size, seed=seed).to(spec.kind) for seed in (1, 2)
        )
        self.sees = tree_sees(self.count, setting.device)
        self.tree_mask = TreeMask.of(self.sees, prefix=self.prefix)

    @property
    def groups(self) -> int:
        return self.heads // self.key_heads

    @property
    def pairs(self) -> int:
        """Of a query and a key that it sees."""
        return self.count * self.prefix + int(self.sees.sum())

    @property
    def nbytes(self) -> int:
        """Queries, keys and values read once, results written once."""
        return 2 * self.query.nbytes + self.key.nbytes + self.value.nbytes

    @property
    def mask_bytes(self) -> int:
        return self.count * (self.prefix + self.count) * self.query.itemsize

    def mask(self) -> Tensor:
        """[N, S] in the queries' dtype: 0 where a query may look, -inf elsewhere."""
        seen = torch.cat([self.sees.new_ones(self.count, self.prefix), self.sees], dim=1)
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
    """torch's attention in three ways, each handed what it needs: masks and repeated keys cost it nothing."""
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
    """FlexAttention, compiled, with a mask of blocks; making that is compiled too, and timed apart.

    All of it happens at the first call, so that what fails is this rival and not the case.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    prefix, sees = given.prefix, given.sees

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
