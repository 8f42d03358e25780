"""Attention of a token tree in torch's own operations, for a CPU.

A CPU's two costs are the matrix products and one exponential for each pair of query and key. torch's fused
attention runs its products, small ones, at well under half the rate of large ones in bfloat16. Here the
products are large: all rows that share a key head against some two thousand keys at a time.

In bfloat16 a product's result is rounded to eight bits, too few for a score. So the maximum of each row is
subtracted inside the product, as what it is added to: a score that matters is then near nought, where
bfloat16 is fine, and one that is rounded coarsely has a weight of nearly nothing. The maximum has to be known
before. It comes from the keys that are done first, exactly: the tree's own, and the first of the prefix,
which attract most attention in many models. Rows for which a later key beats it are done again.

Letters: see `sight`; G query heads a key head, R = G n folded rows, K keys of a block, E numbers of a value.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from offspec_kernels.sight import Reach, Sight

_LOG2E = 1.4426950408889634
_LOWEST = -(2.0**99)  # a maximum over nothing; a bfloat16, as all offsets are

# torch's attention with a dense mask is as fast while there are few keys, and faster where there are few
# pairs of folded row and key, which is also how large such a mask may be.
_FEW_KEYS, _SMALL = 1536, 1 << 20
_KEPT = 16 << 20  # bytes of such masks that are kept from layer to layer
_ROWS, _DENSE_ROWS = 2048, 256  # most folded rows of a block, and queries that share a mask of few keys
_OPEN_KEYS, _MASKED_KEYS = 2048, 512  # keys of a block that all rows see, and of one that is done exactly
_SUM = 128  # weights that are added up before a sum is rounded to bfloat16
_SINKS = 64  # first keys, done exactly
# By how much, in powers of two, a score may stand above the maximum: its weight is then still known to 2^-7.
_HEADROOM = 2.0


def scratch_bytes(rows: int, keys: int, groups: int, dtype: torch.dtype) -> int:
    """Most bytes beside the result, for up to `rows` queries over `keys` keys and G = `groups`."""
    folded = min(groups * rows, max(_ROWS, groups))
    desk = folded * (_MASKED_KEYS * 4 + (_OPEN_KEYS * 2 if dtype == torch.bfloat16 else 0))
    blocks = folded * 256 * 4 * 5 + (folded // groups) * min(keys, rows)  # queries, sums and what is hidden
    dense = min(groups * rows * keys, _SMALL) * dtype.itemsize
    if groups * rows * keys <= _SMALL:
        return 2 * dense
    few = min(keys, _FEW_KEYS)
    kept = min(groups * min(rows, few) * few * dtype.itemsize, _KEPT)
    return kept + max(desk + blocks, dense)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sight: Sight,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """See `tree_attention`. Scratch: see `scratch_bytes`."""
    groups = query.shape[1] // key.shape[1]
    plain = not softcap and sinks is None
    for tree, reach in enumerate(sight.reaches()):
        if reach.count < out.shape[2]:
            out[tree, :, reach.count :] = 0
        q, k, v, o = query[tree], key[tree], value[tree], out[tree]
        desk: _Desk | None = None
        for rows, dense in _row_blocks(reach, groups, plain):
            if dense:
                _fused(q, k, v, sight, tree, rows, scale, window, o)
                continue
            desk = desk or _Desk(min(groups * reach.count, max(_ROWS, groups)), query.dtype, query.device)
            cut = _Cut(sight, tree, reach, rows, window)
            for head in range(len(k)):
                lanes = slice(head * groups, (head + 1) * groups)
                aside = None if sinks is None else sinks[lanes]
                block = _Rows(desk, q[lanes, rows[0] : rows[1]], scale, softcap, aside)
                cut.over(block, k[head], v[head])
                o[lanes, rows[0] : rows[1]] = block.result().to(out.dtype)


def _row_blocks(reach: Reach, groups: int, plain: bool) -> Iterator[tuple[tuple[int, int], bool]]:
    """Queries that are done together, and whether by torch's attention with a dense mask."""
    if plain and groups * reach.count * reach.keys <= _SMALL:
        yield (0, reach.count), True
        return
    behind = reach.prefix + reach.first
    few = min(max(_FEW_KEYS - behind, 0), reach.count) if plain else 0  # queries that see few keys
    most = min(_DENSE_ROWS, max(1, _SMALL // (groups * _FEW_KEYS)))
    yield from ((rows, True) for rows in _evenly(0, few, most))
    yield from ((rows, False) for rows in _evenly(few, reach.count, max(1, _ROWS // groups)))


def _evenly(start: int, end: int, most: int) -> list[tuple[int, int]]:
    """[start, end) in parts of at most `most`, as even as can be."""
    count, parts = end - start, -(-(end - start) // most)
    return [(start + count * i // parts, start + count * (i + 1) // parts) for i in range(parts)]


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sight: Sight,
    tree: int,
    rows: tuple[int, int],
    scale: float,
    window: int | None,
    out: Tensor,
) -> None:
    """By torch's attention, with a mask that serves all layers of a pass."""
    (start, end), heads = rows, len(query)
    reach, groups = sight.reaches()[tree], heads // len(key)
    keys = reach.prefix + reach.first + end
    name = (tree, rows, groups, window, query.dtype)
    bias = sight.kept.get(name)
    if bias is None:
        seen = sight.visible(tree, rows, (0, keys), window).repeat(groups, 1)
        bias = torch.zeros(seen.shape, dtype=query.dtype, device=query.device)
        bias.masked_fill_(~seen, float("-inf"))
        if sum(mask.nbytes for mask in sight.kept.values()) + bias.nbytes <= _KEPT:
            sight.kept[name] = bias
    folded = query[:, start:end].reshape(1, len(key), groups * (end - start), query.shape[2])
    done = F.scaled_dot_product_attention(
        folded, key[None, :, :keys], value[None, :, :keys], attn_mask=bias, scale=scale
    )
    out[:, start:end] = done.view(heads, end - start, -1)


class _Desk:
    """Memory that every block works in: fresh memory of that size costs as much as what is done in it."""

    def __init__(self, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self._scores = torch.empty(rows * _MASKED_KEYS, device=device)
        narrow = rows * _OPEN_KEYS if dtype == torch.bfloat16 else 0
        self._weights = torch.empty(narrow, dtype=dtype, device=device)

    def scores(self, rows: int, keys: int) -> Tensor:
        return self._scores[: rows * keys].view(rows, keys)

    def weights(self, rows: int, keys: int) -> Tensor:
        return self._weights[: rows * keys].view(rows, keys)


class _Rows:
    """R folded rows of one key head, and what the keys so far have brought them.

    Weights are 2^(score - offset), scores in powers of two; total [R, 1] is their sum, acc [R, E] that of the
    values so weighted. offset [R, 1] is near the largest score so far, and a bfloat16.
    """

    def __init__(
        self, desk: _Desk, query: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
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
            sink = (sinks.float() * _LOG2E).repeat_interleave(self.count)[:, None]
            self.offset = _rounded(sink)
            self.total = torch.exp2(sink - self.offset)
        self.acc: Tensor | None = None

    def take(self, key: Tensor, value: Tensor, hidden: Tensor | None) -> None:
        """Keys [K, D] and values [K, E], exactly; hidden [n, K] bool says where a row may not look."""
        scores = torch.mm(self.wide, key.float().T, out=self.desk.scores(len(self.wide), len(key)))
        if self.softcap:
            scores = scores.div_(self.softcap).tanh_().mul_(self.softcap)
        scores.mul_(_LOG2E)
        if hidden is not None:
            scores.view(self.groups, self.count, -1).masked_fill_(hidden, float("-inf"))
        self._move(_rounded(torch.maximum(self.offset, scores.amax(dim=1, keepdim=True))))
        weights = scores.sub_(self.offset).exp2_()
        self.total += weights.sum(dim=1, keepdim=True)
        if self.dtype != torch.float32:
            weights = self.desk.weights(*weights.shape).copy_(weights)
        self._add(weights, value)

    def take_narrow(self, key: Tensor, value: Tensor) -> None:
        """Keys that all rows see, in bfloat16 alone."""
        weights = self.desk.weights(len(self.query), len(key)).copy_(-self.offset)
        torch.addmm(weights, self.query, key.T, alpha=self.scale * _LOG2E, out=weights)
        # The bits of positive floats, read as integers, are in their order and above those of negative ones.
        # Right where it is positive, which is all that is asked of it, and ten times as fast.
        top = weights.view(torch.int16).amax(dim=1, keepdim=True).view(torch.bfloat16)
        late = (top[:, 0] > _HEADROOM).nonzero()[:, 0]
        if len(late):
            self._move(_rounded(self.offset + torch.where(top > _HEADROOM, top, 0)))
            below = (-self.offset[late]).to(weights.dtype)
            weights[late] = torch.addmm(below, self.query[late], key.T, alpha=self.scale * _LOG2E)
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


class _Cut:
    """The keys of a block of rows, cut into what all of them see and what a mask decides.

    open: keys [low, end) that all see; masks: pieces of keys that some see, the last of them the rows' own.
    """

    def __init__(
        self, sight: Sight, tree: int, reach: Reach, rows: tuple[int, int], window: int | None
    ) -> None:
        begin = reach.first + rows[0]
        end = reach.prefix + min(reach.causal, begin)
        low = start = 0
        if window:
            places = sight.position[tree, begin : reach.first + rows[1]]  # type: ignore[index]
            start = min(max(int(places.min()) - window + 1, 0), end)
            low = min(max(int(places.max()) - window + 1, start), end)
        last = reach.prefix + reach.first + rows[1]
        self._open = (low, end)
        self._masks: list[tuple[slice, Tensor]] = []
        for piece in _pieces(end, last) + _pieces(start, low):
            seen = sight.visible(tree, rows, (piece.start, piece.stop), window)
            self._masks.append((piece, seen.logical_not_()))

    def over(self, rows: _Rows, key: Tensor, value: Tensor) -> None:
        """Bring key [S, D] and value [S, E] to the rows."""
        for piece, hidden in self._masks:
            rows.take(key[piece], value[piece], hidden)
        low, end = self._open
        if not rows.narrow:
            for piece in _pieces(low, end):
                rows.take(key[piece], value[piece], None)
            return
        sinks = min(low + _SINKS, end)
        if low < sinks:
            rows.take(key[low:sinks], value[low:sinks], None)
        for start in range(sinks, end, _OPEN_KEYS):
            piece = slice(start, min(start + _OPEN_KEYS, end))
            rows.take_narrow(key[piece], value[piece])


def _pieces(start: int, end: int) -> list[slice]:
    """Blocks of keys that are done exactly, the last first: it holds the rows themselves."""
    return [slice(max(stop - _MASKED_KEYS, start), stop) for stop in range(end, start, -_MASKED_KEYS)]


def _rounded(offset: Tensor) -> Tensor:
    return offset.bfloat16().float()
