"""Keys that many rows see: a softmax that grows, in products of fixed blocks of keys, in float32.

Letters: R folded rows, each a query of a head; K keys of a block, D and E numbers of a key and a value.
"""

from dataclasses import dataclass
from functools import partial

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
    """What the keys so far have brought some rows.

    Args:
        acc: [R, E] float32, values weighted by 2^(score - top), scores in powers of two.
        top: [R] float32, near the largest score so far.
        total: [R] float32, the sum of the weights.
    """

    acc: Tensor
    top: Tensor
    total: Tensor

    def of(self, rows: slice) -> "Sums":
        """Views of some rows."""
        return Sums(self.acc[rows], self.top[rows], self.total[rows])

    def move(self, top: Tensor) -> None:
        """Make `top` [R] what they are relative to."""
        shrink = exp2(self.top - top)
        if bool((shrink != 1).any()):  # by one, nothing changes
            self.acc *= shrink[:, None]
            self.total *= shrink
        self.top.copy_(top)


class Blocks:
    """The products of one key head.

    Args:
        memory: float32, for scores of all rows and WIDE_KEYS keys, or as many as a piece has: fresh memory
            of that size costs as much as what is done in it.
        wide: [R + LEAST_ROWS, D] float32, its last rows nought, scaled so that scores are in powers of two.
        cap: The soft cap of scores in powers of two, nought for none.
    """

    def __init__(self, memory: Tensor, wide: Tensor, cap: float) -> None:
        self._memory, self._wide, self._cap = memory, wide, cap

    def take(self, sums: Sums, rows: slice, piece: Piece, key: Rows, value: Rows) -> None:
        """Keys [S, D] and values [S, E] at the positions of `piece`, for folded rows `rows`.

        Weights are in the keys' dtype where that is bfloat16.
        """
        where = slice(piece.low, piece.high) if piece.keys is None else piece.keys
        every = [values_of(of[where]) for of in (key, value)]
        wide, part = self._wide[rows.start : max(rows.stop, rows.start + LEAST_ROWS)], sums.of(rows)
        (count, width), shrink = part.acc.shape, torch.empty(len(part.top), dtype=torch.float32)
        for start in range(0, piece.high - piece.low, WIDE_KEYS):
            keys, values = (of[start : start + WIDE_KEYS] for of in every)
            scores = self._memory[: len(wide) * len(keys)].view(len(wide), -1)
            torch.mm(wide, keys.float().T, out=scores)
            scores[count:] = 0
            spread(partial(_weigh, scores, self._cap, part, shrink), count, count * len(keys))
            narrow = value.dtype == torch.bfloat16
            weights, given = (scores.bfloat16(), values) if narrow else (scores, values.float())
            # With other numbers of columns a row's bits depend on how many rows there are.
            brought = torch.mm(weights, F.pad(given, (0, -width % _COLUMNS)))
            part.acc.mul_(shrink[:, None]).add_(brought[:count, :width])


def exp2(x: Tensor) -> Tensor:
    """2^x of numbers [R]. torch's own differs by whether a vector's end is done one by one."""
    result = torch.empty_like(x)
    powers(x.numpy(), result.numpy())
    return result


def _weigh(scores: Tensor, cap: float, sums: Sums, shrink: Tensor, start: int, end: int) -> None:
    tops, totals = sums.top.numpy(), sums.total.numpy()
    weigh_wide(scores.numpy(), cap, tops, totals, shrink.numpy(), start, end)
