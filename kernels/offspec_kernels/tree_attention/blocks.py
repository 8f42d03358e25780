"""Keys that many rows see: a softmax that grows, in products of fixed blocks of keys.

In bfloat16 a product's result is rounded to eight bits, too few for a score. So an offset near the row's
largest score is subtracted inside the product, as what it is added to: a score that matters is then near
nought, where bfloat16 is fine, and one that is rounded coarsely has a weight of nearly nothing. The offset
has to be known before, from the keys near the row and an estimate of the first ones, which attract most
attention in many models. A row for which a later key beats it is done again. All of this is decided for each
row by itself.

Letters: R folded rows, each a query of a head; K keys of a block, D and E numbers of a key and a value.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from offspec_kernels.dequant.native import array
from offspec_kernels.dequant.threads import spread
from offspec_kernels.quantised_rows import Rows, values_of
from offspec_kernels.tree_attention.native import powers, weigh_narrow, weigh_wide
from offspec_kernels.tree_attention.paths import Piece
from offspec_kernels.tree_attention.sizes import BLOCK, LEAST_ROWS, WIDE_KEYS

_FEW_KEYS = 256  # that are done in float32 in any case, which takes fewer operations
_FIRST_KEYS = 64  # whose largest score is estimated
# By how much, in powers of two, a score may stand above the offset: its weight is then still known to 2^-7.
_HEADROOM = 2.0
_LARGEST = 256.0  # an offset that is a bfloat16 to within one; a row beyond it is not done in bfloat16


class Desk:
    """Memory that every block works in: fresh memory of that size costs as much as what is done in it."""

    def __init__(self, rows: int, keys: int, dtype: torch.dtype) -> None:
        rows += LEAST_ROWS
        self._scores = torch.empty(rows * min(keys, WIDE_KEYS))
        self._narrow = torch.empty(rows * min(keys, BLOCK) if dtype == torch.bfloat16 else 0, dtype=dtype)

    def scores(self, rows: int, keys: int) -> Tensor:
        return self._scores[: rows * keys].view(rows, keys)

    def narrow(self, rows: int, keys: int) -> Tensor:
        return self._narrow[: rows * keys].view(rows, keys)


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

    def of(self, rows: slice | Tensor) -> "Sums":
        """Views of some rows, or copies where `rows` is an index."""
        return Sums(self.acc[rows], self.top[rows], self.total[rows])

    def put(self, rows: Tensor, sums: "Sums") -> None:
        """Write back what `of` copied."""
        self.acc[rows], self.top[rows], self.total[rows] = sums.acc, sums.top, sums.total

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
        desk: For as many rows as there are.
        query: [R + LEAST_ROWS, D] in the keys' dtype, its last rows nought.
        wide: The same in float32, scaled so that scores are in powers of two.
        scale: By how much.
        cap: The soft cap of scores in powers of two, nought for none.
    """

    def __init__(self, desk: Desk, query: Tensor, wide: Tensor, scale: float, cap: float) -> None:
        self._desk, self._query, self._wide, self._scale, self._cap = desk, query, wide, scale, cap
        self._is_narrow = query.dtype == torch.bfloat16 and not cap

    def take(self, sums: Sums, rows: slice, piece: Piece, key: Rows, value: Rows) -> None:
        """Keys [S, D] and values [S, E] at the positions of `piece`, for folded rows `rows`."""
        where = slice(piece.low, piece.high) if piece.keys is None else piece.keys
        keys, values = values_of(key[where]), values_of(value[where])
        count = rows.stop - rows.start
        padded = slice(rows.start, max(rows.stop, rows.start + LEAST_ROWS))
        part = sums.of(rows)
        if not self._is_narrow or len(keys) <= _FEW_KEYS:
            self._take_wide(part, self._wide[padded], keys, values)
            return
        query = self._query[padded]
        top = part.top
        if piece.low == 0:
            first = torch.mm(query, keys[:_FIRST_KEYS].T)[:count]
            top = torch.maximum(top, first.amax(dim=1).float() * self._scale)
        part.move(_rounded(top))
        late = self._take_narrow(part, query, keys, values)
        if len(late):
            again = torch.cat([late, late.new_zeros(max(LEAST_ROWS - len(late), 0))])
            apart = part.of(late)
            self._take_wide(apart, self._wide[padded][again], keys, values)
            part.put(late, apart)

    def _take_narrow(self, sums: Sums, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """In bfloat16 alone. Returns the rows for which that would not do, which it leaves as they were."""
        count = len(sums.top)
        weights = self._meet(sums.top, query, key, self._desk.narrow(len(query), len(key)))
        tops = torch.empty(count)
        far = (sums.top.abs() > _LARGEST).nonzero()[:, 0]
        weights[far] = -torch.inf  # their weights are nought here
        _weigh(weights[:count], _HEADROOM, tops, sums.total)
        late = (tops > _HEADROOM).nonzero()[:, 0]
        if len(late):
            raised = _rounded(sums.top[late] + tops[late])
            beyond = raised.abs() > _LARGEST
            far, late, raised = torch.cat([far, late[beyond]]), late[~beyond], raised[~beyond]
            weights[far] = 0
        if len(late):
            again = sums.of(late)
            again.move(raised)
            padded = torch.cat([late, late.new_zeros(max(LEAST_ROWS - len(late), 0))])
            room = torch.empty(len(padded), len(key), dtype=query.dtype)
            redone = self._meet(again.top, query[padded], key, room)[: len(late)]
            _weigh(redone, torch.inf, torch.empty(len(late)), again.total)
            weights[late] = redone
            sums.put(late, again)
        sums.acc += torch.mm(weights, value)[:count]
        return far

    def _meet(self, top: Tensor, query: Tensor, key: Tensor, scores: Tensor) -> Tensor:
        """Scores less `top`, rounded once, in `scores` [R, K]."""
        scores[: len(top)] = -top[:, None]
        scores[len(top) :] = 0
        return torch.addmm(scores, query, key.T, alpha=self._scale, out=scores)

    def _take_wide(self, sums: Sums, wide: Tensor, key: Tensor, value: Tensor) -> None:
        """Scores in float32, weights in the keys' dtype where that is bfloat16."""
        count = len(sums.top)
        shrink = torch.empty(count)
        for start in range(0, len(key), WIDE_KEYS):
            keys, values = key[start : start + WIDE_KEYS], value[start : start + WIDE_KEYS]
            scores = torch.mm(wide, keys.float().T, out=self._desk.scores(len(wide), len(keys)))
            scores[count:] = 0
            weigh = partial(_weigh_wide, scores, self._cap, sums, shrink)
            spread(weigh, count, count * len(keys))
            if value.dtype == torch.bfloat16:
                weights = self._desk.narrow(*scores.shape).copy_(scores)
                brought = torch.mm(weights, values)
            else:
                brought = torch.mm(scores, values.float())
            sums.acc.mul_(shrink[:, None]).add_(brought[:count])


def exp2(x: Tensor) -> Tensor:
    """2^x of numbers [R]. torch's own differs by whether a vector's end is done one by one."""
    result = torch.empty_like(x)
    powers(x.numpy(), result.numpy())
    return result


def _weigh(scores: Tensor, headroom: float, tops: Tensor, totals: Tensor) -> None:
    found, top, total = array(scores).reshape(scores.shape), tops.numpy(), totals.numpy()

    def work(start: int, end: int) -> None:
        weigh_narrow(found, headroom, top, total, start, end)

    spread(work, len(scores), scores.numel())


def _weigh_wide(scores: Tensor, cap: float, sums: Sums, shrink: Tensor, start: int, end: int) -> None:
    tops, totals = sums.top.numpy(), sums.total.numpy()
    weigh_wide(scores.numpy(), cap, tops, totals, shrink.numpy(), start, end)


def _rounded(top: Tensor) -> Tensor:
    """What `top` is rounded to where it can be added to in bfloat16."""
    return torch.where(top.abs() > _LARGEST, top, top.bfloat16())
