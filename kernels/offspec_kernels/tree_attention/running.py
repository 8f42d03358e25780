"""Rows of queries and what the keys so far have brought them: a softmax that grows block by block.

In bfloat16 a product's result is rounded to eight bits, too few for a score. So the maximum of each row is
subtracted inside the product, as what it is added to: a score that matters is then near nought, where
bfloat16 is fine, and one that is rounded coarsely has a weight of nearly nothing. The maximum has to be known
before, from keys that are done exactly. Rows for which a later key beats it are done again.

Letters: G query heads a key head, n queries, R = G n folded rows, K keys of a block, D and E numbers of a key
and a value.
"""

import torch
from torch import Tensor

LOG2E = 1.4426950408889634
OPEN_KEYS, MASKED_KEYS = 2048, 512  # most keys of a block in bfloat16 alone, and of one that is done exactly
_LOWEST = -(2.0**99)  # a maximum over nothing; -inf would make numbers that are none
_SUM = 128  # weights that are added up before a sum is rounded to bfloat16
# By how much, in powers of two, a score may stand above the maximum: its weight is then still known to 2^-7.
_HEADROOM = 2.0
_LARGEST = 256.0  # an offset that is a bfloat16 to within one; beyond it nothing is done in bfloat16 alone


class Desk:
    """Memory that every block works in: fresh memory of that size costs as much as what is done in it."""

    def __init__(self, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self._scores = torch.empty(rows * MASKED_KEYS, device=device)
        narrow = rows * OPEN_KEYS if dtype == torch.bfloat16 else 0
        self._weights = torch.empty(narrow, dtype=dtype, device=device)

    def scores(self, rows: int, keys: int) -> Tensor:
        return self._scores[: rows * keys].view(rows, keys)

    def weights(self, rows: int, keys: int) -> Tensor:
        return self._weights[: rows * keys].view(rows, keys)


class Rows:
    """R folded rows of one key head, and what the keys so far have brought them.

    Weights are 2^(score - offset), scores in powers of two; total [R, 1] is their sum, acc [R, E] that of the
    values so weighted. offset [R, 1] is near the largest score so far; in bfloat16 it is one, if it is small.
    """

    def __init__(
        self, desk: Desk, query: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
    ) -> None:
        self.desk = desk
        self.groups, self.count, size = query.shape
        self.query = query.reshape(-1, size)  # [R, D]
        self.wide = self.query.float() * scale
        self.scale, self.softcap = scale, softcap
        # Elsewhere bfloat16 is the only type whose products are worth their rounding.
        self.narrow = query.dtype == torch.bfloat16 and not softcap
        self.dtype = query.dtype if query.dtype == torch.bfloat16 else torch.float32
        if sinks is None:
            self.offset = torch.full_like(self.wide[:, :1], _LOWEST)
            self.total = torch.zeros_like(self.offset)
        else:
            sink = (sinks.float() * LOG2E).repeat_interleave(self.count)[:, None]
            self.offset = self._near(sink).clamp_(min=_LOWEST)
            self.total = torch.exp2(sink - self.offset)
        self.acc: Tensor | None = None

    def take(self, key: Tensor, value: Tensor, hidden: Tensor | None) -> None:
        """Keys [K, D] and values [K, E], exactly; hidden [n, K] bool says where a row may not look."""
        scores = torch.mm(self.wide, key.float().T, out=self.desk.scores(len(self.wide), len(key)))
        if self.softcap:
            scores = scores.div_(self.softcap).tanh_().mul_(self.softcap)
        scores.mul_(LOG2E)
        if hidden is not None:
            scores.view(self.groups, self.count, -1).masked_fill_(hidden, float("-inf"))
        self._move(self._near(torch.maximum(self.offset, scores.amax(dim=1, keepdim=True))))
        weights = scores.sub_(self.offset).exp2_()
        self.total += weights.sum(dim=1, keepdim=True)
        if self.dtype != torch.float32:
            weights = self.desk.weights(*weights.shape).copy_(weights)
        self._add(weights, value)

    def take_narrow(self, key: Tensor, value: Tensor) -> None:
        """Keys that all rows see, in bfloat16 alone where the offsets let it."""
        if _is_far(self.offset):
            return self._take_in_pieces(key, value)
        weights = self.desk.weights(len(self.query), len(key))
        self._meet(key, weights)
        # The bits of positive floats, read as integers, are in their order and above those of negative ones.
        # Right where it is positive, which is all that is asked of it, and ten times as fast.
        top = weights.view(torch.int16).amax(dim=1, keepdim=True).view(torch.bfloat16)
        late = (top[:, 0] > _HEADROOM).nonzero()[:, 0]
        if len(late):
            raised = self.offset + torch.where(top > _HEADROOM, top, 0)
            if _is_far(raised):
                return self._take_in_pieces(key, value)
            self._move(self._near(raised))
            if 2 * len(late) > len(weights):  # all again is less work than to pick out that many
                self._meet(key, weights)
            else:
                below = (-self.offset[late]).to(weights.dtype)
                weights[late] = torch.addmm(below, self.query[late], key.T, alpha=self.scale * LOG2E)
        weights.exp2_()
        whole = weights.shape[1] // _SUM * _SUM
        if whole:
            self.total += weights[:, :whole].unflatten(1, (-1, _SUM)).sum(dim=2).float().sum(1, keepdim=True)
        self.total += weights[:, whole:].sum(dim=1, keepdim=True, dtype=torch.float32)
        self._add(weights, value)

    def result(self) -> Tensor:
        """[G, n, E] float32."""
        assert self.acc is not None
        return (self.acc / self.total).view(self.groups, self.count, -1)

    def _meet(self, key: Tensor, scores: Tensor) -> None:
        """Scores less offset, rounded once, [R, K] bfloat16."""
        scores.copy_(-self.offset)
        torch.addmm(scores, self.query, key.T, alpha=self.scale * LOG2E, out=scores)

    def _take_in_pieces(self, key: Tensor, value: Tensor) -> None:
        for start in range(0, len(key), MASKED_KEYS):
            piece = slice(start, start + MASKED_KEYS)
            self.take(key[piece], value[piece], None)

    def _near(self, offset: Tensor) -> Tensor:
        """What `offset` is rounded to where it can be added to in bfloat16."""
        if not self.narrow:
            return offset.clone()
        return torch.where(offset.abs() > _LARGEST, offset, offset.bfloat16())

    def _move(self, offset: Tensor) -> None:
        """Another offset, and what there is in its terms."""
        shrink = torch.exp2(self.offset - offset)
        self.total *= shrink
        if self.acc is not None:
            self.acc *= shrink
        self.offset = offset

    def _add(self, weights: Tensor, value: Tensor) -> None:
        brought = weights @ value.to(self.dtype)
        if self.acc is None:
            self.acc = brought.float()
        else:
            self.acc += brought


def _is_far(offset: Tensor) -> bool:
    return float(offset.abs().max()) > _LARGEST
