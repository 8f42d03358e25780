"""Attention of a token tree in torch's own operations, for a CPU.

A CPU's two costs are the matrix products and one exponential for each pair of query and key. torch's fused
attention runs its products, small ones, at well under half the rate of large ones in bfloat16. Here the
products are large: all rows that share a key head against some two thousand keys at a time.

Letters: see `tree_mask`; G query heads a key head, R = G n folded rows, K keys of a block, E numbers of a
value.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from offspec_kernels.chunks import split_evenly
from offspec_kernels.tree_attention.running import MASKED_KEYS, OPEN_KEYS, Desk, Rows
from offspec_kernels.tree_mask import TreeExtent, TreeMask

# torch's attention with a dense mask is as fast while there are few keys, and faster where there are few
# pairs of folded row and key, which is also how large such a mask may be.
_FEW_KEYS, _SMALL = 1536, 1 << 20
_KEPT = 16 << 20  # bytes of such masks that are kept from layer to layer
_ROWS, _DENSE_ROWS = 2048, 256  # most folded rows of a block, and queries that share a mask of few keys
_SINKS = 64  # first keys, which attract most attention in many models, and so are done first, exactly


def scratch_bytes(rows: int, keys: int, heads: int, groups: int, dtype: torch.dtype) -> int:
    """Most bytes beside the result: up to `rows` queries of `heads` heads over `keys` keys, G = `groups`."""
    item, wide = dtype.itemsize, 256  # bytes of a number, and numbers of a query or value, at most
    few = min(keys, _FEW_KEYS)
    pairs = min(rows * keys, max(_SMALL // groups, keys))  # of query and key, under a dense mask
    kept = min(groups * max(min(rows, few) * few, pairs) * item, _KEPT)
    dense = pairs * (groups * item + item + 3) + min(rows, pairs // keys) * heads * 3 * wide * item
    folded = min(groups * rows, max(_ROWS, groups))
    desk = folded * (MASKED_KEYS * 4 + (OPEN_KEYS * 2 if dtype == torch.bfloat16 else 0))
    if groups * rows * keys <= _SMALL:
        desk = min(desk, pairs * groups * 6)
    masks = 3 * (folded // groups) * min(keys, rows)
    return kept + max(dense, desk + masks + folded * 5 * wide * 4)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree_mask: TreeMask,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """See `tree_attention`. Scratch: see `scratch_bytes`."""
    groups = query.shape[1] // key.shape[1]
    # torch's attention does without large copies of its own where keys and values are equally wide.
    plain = not softcap and sinks is None and query.shape[3] == value.shape[3]
    for tree, reach in enumerate(tree_mask.reaches()):
        if reach.count < out.shape[2]:
            out[tree, :, reach.count :] = 0
        if not reach.count:
            continue
        q, k, v, o = query[tree], key[tree], value[tree], out[tree]
        desk: Desk | None = None
        for rows, dense in _row_blocks(reach, groups, plain):
            if dense:
                _fused(q, k, v, tree_mask, tree, rows, scale, window, o)
                continue
            desk = desk or Desk(min(groups * reach.count, max(_ROWS, groups)), query.dtype, query.device)
            cut = _Cut(tree_mask, tree, reach, rows, window)
            for head in range(len(k)):
                lanes = slice(head * groups, (head + 1) * groups)
                aside = None if sinks is None else sinks[lanes]
                block = Rows(desk, q[lanes, rows[0] : rows[1]], scale, softcap, aside)
                cut.over(block, k[head], v[head])
                o[lanes, rows[0] : rows[1]] = block.result().to(out.dtype)


def _row_blocks(reach: TreeExtent, groups: int, plain: bool) -> Iterator[tuple[tuple[int, int], bool]]:
    """Queries that are done together, and whether by torch's attention with a dense mask."""
    if plain and groups * reach.count * reach.keys <= _SMALL:
        yield (0, reach.count), True
        return
    behind = reach.prefix + reach.first
    few = min(max(_FEW_KEYS - behind, 0), reach.count) if plain else 0  # queries that see few keys
    most = min(_DENSE_ROWS, max(1, _SMALL // (groups * _FEW_KEYS)))
    for part in split_evenly(0, few, most):
        yield (part.start, part.stop), True
    for part in split_evenly(few, reach.count, max(1, _ROWS // groups)):
        yield (part.start, part.stop), False


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree_mask: TreeMask,
    tree: int,
    rows: tuple[int, int],
    scale: float,
    window: int | None,
    out: Tensor,
) -> None:
    """By torch's attention, with a mask that serves all layers of a pass."""
    (start, end), heads = rows, len(query)
    reach, groups = tree_mask.reaches()[tree], heads // len(key)
    keys = reach.prefix + reach.first + end
    name = (tree, reach, rows, groups, window, query.dtype)
    bias = tree_mask.kept.get(name)
    if bias is None:
        hidden = tree_mask.visible(tree, rows, (0, keys), window).logical_not_()
        bias = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
        bias = bias.masked_fill_(hidden, float("-inf")).repeat(groups, 1)
        if sum(mask.nbytes for mask in tree_mask.kept.values()) + bias.nbytes <= _KEPT:
            tree_mask.kept[name] = bias
    folded = query[:, start:end].reshape(1, len(key), groups * (end - start), query.shape[2])
    done = F.scaled_dot_product_attention(
        folded, key[None, :, :keys], value[None, :, :keys], attn_mask=bias, scale=scale
    )
    out[:, start:end] = done.view(heads, end - start, -1)


class _Cut:
    """The keys of a block of rows, cut into what all of them see and what a mask decides.

    open: keys [low, end) that all see; masks: pieces of keys that some see, the last of them the rows' own.
    """

    def __init__(
        self, tree_mask: TreeMask, tree: int, reach: TreeExtent, rows: tuple[int, int], window: int | None
    ) -> None:
        begin = reach.first + rows[0]
        end = reach.prefix + min(reach.causal, begin)
        low = start = 0
        if window:
            places = tree_mask.position[tree, begin : reach.first + rows[1]]  # type: ignore[index]
            start = min(max(int(places.min()) - window + 1, 0), end)
            low = min(max(int(places.max()) - window + 1, start), end)
        last = reach.prefix + reach.first + rows[1]
        self._open = (low, end)
        self._masks: list[tuple[slice, Tensor]] = []
        for piece in _pieces(end, last) + _pieces(start, low):
            seen = tree_mask.visible(tree, rows, (piece.start, piece.stop), window)
            self._masks.append((piece, seen.logical_not_()))

    def over(self, rows: Rows, key: Tensor, value: Tensor) -> None:
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
        for start in range(sinks, end, OPEN_KEYS):
            piece = slice(start, min(start + OPEN_KEYS, end))
            rows.take_narrow(key[piece], value[piece])


def _pieces(start: int, end: int) -> list[slice]:
    """Blocks of keys that are done exactly, the last first: it holds the rows themselves."""
    return [slice(max(stop - MASKED_KEYS, start), stop) for stop in range(end, start, -MASKED_KEYS)]
