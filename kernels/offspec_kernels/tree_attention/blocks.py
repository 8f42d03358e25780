"""Keys that many rows see: a softmax that grows, in products of fixed blocks of keys, in float32.

Letters: R folded rows, each a query of a head; K keys of a block, D and E numbers of a key and a value.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from offspec_kernels.dequant.threads import spread
from offspec_kernels.quantised_rows import Rows, values_of
from offspec_kernels.tree_attention.native import powers, weigh_wide
from offspec_kernels.tree_attention.paths import Piece
from offspec_kernels.tree_attention.sizes import LEAST_ROWS, WIDE_KEYS

_COLUMNS = 16  # of which a product makes a multiple


@dataclass(slots=True)
class Sums:
    """What the keys so far have brought some rows, those of several key heads or of one.

    Args:
        acc: [KV, R, E] float32, values weighted by 2^(score - top), scores in powers of two.
        top: [KV, R] float32, near the largest score so far.
        total: [KV, R] float32, the sum of the weights.
    """

    acc: Tensor
    top: Tensor
    total: Tensor

    def of(self, index: Any) -> "Sums":
        """Views of some heads or rows."""
        return Sums(self.acc[index], self.top[index], self.total[index])

    def add_sinks(self, sinks: Tensor) -> None:
        """Scores [KV, R] that take a share without a value."""
        top = torch.maximum(self.top, sinks)
        shrink = exp2(self.top - top)
        if bool((shrink != 1).any()):  # by one, nothing changes
            self.acc *= shrink[..., None]
            self.total *= shrink
        self.top.copy_(top)
        self.total += exp2(sinks - top)


def take(
    wide: Tensor, key: Rows, value: Rows, pieces: Sequence[Piece], groups: int, cap: float, sums: Sums
) -> None:
    """Bring keys to sums so far.

    Args:
        wide: Queries [KV, R + LEAST_ROWS, D] float32 of G = `groups` heads a key head, the last rows nought,
            scaled so that scores are in powers of two.
        key: [KV, S, D].
        value: [KV, S, E]. Weights are in its dtype where that is bfloat16.
        pieces: In order of position for every row.
        cap: The soft cap of scores in powers of two, nought for none.
        sums: [KV, R].
    """
    most = min(max(piece.high - piece.low for piece in pieces), WIDE_KEYS)
    # For all heads: fresh memory of that size costs as much as what is done in it.
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


def _take_keys(memory: Tensor, wide: Tensor, keys: Tensor, values: Tensor, cap: float, sums: Sums) -> None:
    """A product of some rows of a head with a block of keys; memory: for its scores."""
    (count, width), shrink = sums.acc.shape, torch.empty(len(sums.top), dtype=torch.float32)
    scores = memory[: len(wide) * len(keys)].view(len(wide), -1)
    torch.mm(wide, keys.float().T, out=scores)
    scores[count:] = 0
    tops, totals = sums.top.numpy(), sums.total.numpy()
    spread(partial(weigh_wide, scores.numpy(), cap, tops, totals, shrink.numpy()), count, count * len(keys))
    narrow = values.dtype == torch.bfloat16
    weights, given = (scores.bfloat16(), values) if narrow else (scores, values.float())
    # With other numbers of columns a row's bits depend on how many rows there are.
    brought = torch.mm(weights, F.pad(given, (0, -width % _COLUMNS)))
    sums.acc.mul_(shrink[:, None]).add_(brought[:count, :width])


def exp2(x: Tensor) -> Tensor:
    """2^x of contiguous numbers. torch's own differs by whether a vector's end is done one by one."""
    result = torch.empty_like(x)
    powers(x.view(-1).numpy(), result.view(-1).numpy())
    return result
