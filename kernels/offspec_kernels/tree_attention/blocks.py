"""Attention to keys shared by many rows: an online softmax over fixed blocks of keys, in float32 products.

Letters: R folded rows, each a query of a head; K keys of a block, D and E elements of a key and a value.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from offspec_kernels.dequant.threads import parallel_for
from offspec_kernels.quantized_rows import Rows, values_of
from offspec_kernels.tree_attention.key_ranges import KeyRange
from offspec_kernels.tree_attention.native import powers, weigh_wide
from offspec_kernels.tree_attention.sizes import LEAST_ROWS, WIDE_KEYS

_COLUMNS = 16  # a product's column count is a multiple of this


@dataclass(slots=True)
class SoftmaxState:
    """Accumulated softmax of some rows of one or more key heads.

    Args:
        acc: [KV, R, E] float32, values weighted by 2^(score - top), scores in powers of two.
        running_max: [KV, R] float32, near the largest score so far.
        running_sum: [KV, R] float32, sum of the weights.
    """

    acc: Tensor
    running_max: Tensor
    running_sum: Tensor

    def of(self, index: Any) -> "SoftmaxState":
        """Return views of some heads or rows."""
        return SoftmaxState(self.acc[index], self.running_max[index], self.running_sum[index])

    def add_sinks(self, sinks: Tensor) -> None:
        """Add scores [KV, R] that have a weight but no value."""
        top = torch.maximum(self.running_max, sinks)
        shrink = exp2(self.running_max - top)
        if bool((shrink != 1).any()):  # a factor of one changes nothing
            self.acc *= shrink[..., None]
            self.running_sum *= shrink
        self.running_max.copy_(top)
        self.running_sum += exp2(sinks - top)


def accumulate(
    wide: Tensor,
    key: Rows,
    value: Rows,
    pieces: Sequence[KeyRange],
    groups: int,
    cap: float,
    sums: SoftmaxState,
) -> None:
    """Accumulate keys into `sums`.

    Args:
        wide: Queries [KV, R + LEAST_ROWS, D] float32 with G = `groups` heads per key head, the last rows
            zero, scaled so that scores are in powers of two.
        key: [KV, S, D].
        value: [KV, S, E]. If bfloat16, weights are bfloat16, too.
        pieces: Key ranges in order of position for every row.
        cap: Soft cap of scores in powers of two; zero for none.
        sums: [KV, R].
    """
    most = min(max(piece.high - piece.low for piece in pieces), WIDE_KEYS)
    # Shared by all heads: allocating this much memory takes as long as the work done in it.
    memory = torch.empty(wide.shape[1] * most, dtype=torch.float32)
    for head in range(len(wide)):
        for piece in pieces:
            rows = slice(piece.start * groups, piece.stop * groups)
            asked = wide[head, rows.start : max(rows.stop, rows.start + LEAST_ROWS)]
            where = slice(piece.low, piece.high) if piece.keys is None else piece.keys
            keys, values = (values_of(of[head][where]) for of in (key, value))
            part = sums.of((head, rows))
            for start in range(0, piece.high - piece.low, WIDE_KEYS):
                some = slice(start, start + WIDE_KEYS)
                _take_keys(memory, asked, keys[some], values[some], cap, part)


def _take_keys(
    memory: Tensor, wide: Tensor, keys: Tensor, values: Tensor, cap: float, sums: SoftmaxState
) -> None:
    """Multiply some rows of a head by a block of keys; memory: buffer for the scores."""
    (count, width), shrink = sums.acc.shape, torch.empty(len(sums.running_max), dtype=torch.float32)
    scores = memory[: len(wide) * len(keys)].view(len(wide), -1)
    torch.mm(wide, keys.float().T, out=scores)
    scores[count:] = 0
    tops, totals = sums.running_max.numpy(), sums.running_sum.numpy()
    parallel_for(
        partial(weigh_wide, scores.numpy(), cap, tops, totals, shrink.numpy()), count, count * len(keys)
    )
    narrow = values.dtype == torch.bfloat16
    weights, given = (scores.bfloat16(), values) if narrow else (scores, values.float())
    # With other column counts a row's bits depend on the number of rows.
    brought = torch.mm(weights, F.pad(given, (0, -width % _COLUMNS)))
    sums.acc.mul_(shrink[:, None]).add_(brought[:count, :width])


def exp2(x: Tensor) -> Tensor:
    """Compute 2^x of contiguous numbers. torch computes the end of an array differently."""
    result = torch.empty_like(x)
    powers(x.view(-1).numpy(), result.view(-1).numpy())
    return result
