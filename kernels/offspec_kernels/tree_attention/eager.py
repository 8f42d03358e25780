"""Attention of a token tree on a CPU, whose rows' bits depend on nothing but their own path.

A row meets the keys near it one by one, in a compiled loop (`native`), and the others in products, of
bfloat16 where the processor has them (`small_products`), else in float32 (`blocks`): in order of position,
cut by position alone (`paths`).

Letters: see `tree_mask`; G query heads a key head, n queries that are done together, E numbers of a value.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from offspec_kernels.dequant.native import Array
from offspec_kernels.dequant.threads import spread
from offspec_kernels.quantised_rows import QuantisedRows, Rows, values_of
from offspec_kernels.tree_attention import small_products
from offspec_kernels.tree_attention.blocks import Blocks, Sums, exp2
from offspec_kernels.tree_attention.native import LOG2E, near
from offspec_kernels.tree_attention.paths import Paths, paths_of
from offspec_kernels.tree_attention.sizes import KEPT, LEAST_ROWS, SMALL, WIDE_KEYS, most_rows
from offspec_kernels.tree_mask import TreeMask, Window


def attend(
    query: Tensor,
    key: Rows,
    value: Rows,
    tree_mask: TreeMask,
    scale: float,
    window: Window | None,
    softcap: float | None,
    sinks: Tensor | None,
    out: Tensor,
    exact: bool = True,
    chosen: Tensor | None = None,
) -> None:
    """See `tree_attention`. Scratch: see `scratch_bytes`."""
    heads, groups = query.shape[1], query.shape[1] // key.shape[1]
    factor, cap = scale * LOG2E, (softcap or 0.0) * LOG2E
    plain = (
        not exact and not softcap and sinks is None and chosen is None and query.shape[3] == value.shape[3]
    )
    for tree, reach in enumerate(tree_mask.reaches()):
        if reach.count < out.shape[2]:
            out[tree, :, reach.count :] = 0
        if not reach.count:
            continue
        if plain and groups * reach.count * reach.keys <= SMALL:
            _fused(query[tree], key[tree], value[tree], tree_mask, tree, scale, window, out[tree])
            continue
        name = ("paths", tree, reach, window, groups)
        most = most_rows(heads, groups)
        if chosen is not None:
            every = paths_of(tree_mask, tree, window, most, chosen[tree])
        else:
            if name not in tree_mask.kept:
                tree_mask.kept[name] = paths_of(tree_mask, tree, window, most)
            every = tree_mask.kept[name]
        for paths in every:
            _attend_rows(query[tree], key[tree], value[tree], paths, factor, cap, sinks, out[tree])


def _fused(
    query: Tensor,
    key: Rows,
    value: Rows,
    tree_mask: TreeMask,
    tree: int,
    scale: float,
    window: Window | None,
    out: Tensor,
) -> None:
    """By torch's attention, with a mask that serves all layers of a pass."""
    reach, heads = tree_mask.reaches()[tree], len(query)
    groups = heads // len(key)
    name = ("bias", tree, reach, groups, window, query.dtype)
    bias = tree_mask.kept.get(name)
    if bias is None:
        hidden = tree_mask.visible(tree, (0, reach.count), (0, reach.keys), window).logical_not_()
        bias = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
        bias = bias.masked_fill_(hidden, float("-inf")).repeat(groups, 1)
        if sum(mask.nbytes for mask in tree_mask.kept.values() if isinstance(mask, Tensor)) <= KEPT:
            tree_mask.kept[name] = bias
    folded = query[:, : reach.count].reshape(1, len(key), groups * reach.count, query.shape[2])
    keys, values = (values_of(of[None, :, : reach.keys]) for of in (key, value))
    done = F.scaled_dot_product_attention(folded, keys, values, attn_mask=bias, scale=scale)
    out[:, : reach.count] = done.view(heads, reach.count, -1)


def _attend_rows(
    query: Tensor,
    key: Rows,
    value: Rows,
    paths: Paths,
    factor: float,
    cap: float,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    heads, count, size = len(key), len(paths.rows), query.shape[2]
    groups = len(query) // heads
    asked = query[:, paths.rows].view(heads, groups, count, size).transpose(1, 2)
    folded = query.new_zeros(heads, count * groups + LEAST_ROWS, size)
    folded[:, : count * groups] = asked.reshape(heads, -1, size)
    wide = folded.float().mul_(factor)
    acc = torch.empty(heads, count * groups, value.shape[2], dtype=torch.float32)
    top, total = torch.empty(2, heads, count * groups, dtype=torch.float32).unbind()
    _take_near(wide, key, value, paths, cap, acc, top, total)
    if sinks is not None:
        sink = (sinks.float() * LOG2E).view(heads, 1, groups).expand(-1, count, -1).reshape(heads, -1)
        sums = Sums(acc.view(-1, acc.shape[2]), top.view(-1), total.view(-1))
        sums.move(torch.maximum(top, sink).view(-1))
        total += exp2((sink - top).reshape(-1)).view_as(total)
    narrow = query.dtype == key.dtype == torch.bfloat16 and not cap and size % 2 == 0
    if paths.pieces and narrow and small_products.works():
        small_products.take(folded, key, value, paths.pieces, groups, factor, acc, top, total)
    elif paths.pieces:
        most = min(max(piece.high - piece.low for piece in paths.pieces), WIDE_KEYS)
        memory = torch.empty(wide.shape[1] * most, dtype=torch.float32)
        for head in range(heads):
            blocks, sums = Blocks(memory, wide[head], cap), Sums(acc[head], top[head], total[head])
            for piece in paths.pieces:
                rows = slice(piece.start * groups, piece.stop * groups)
                blocks.take(sums, rows, piece, key[head], value[head])
    acc /= total[:, :, None]
    done = acc.view(heads, count, groups, -1).transpose(1, 2).reshape(heads * groups, count, -1)
    out[:, paths.rows] = done.to(out.dtype)


def _take_near(
    wide: Tensor,
    key: Rows,
    value: Rows,
    paths: Paths,
    cap: float,
    acc: Tensor,
    top: Tensor,
    total: Tensor,
) -> None:
    """The keys of each row's list, for folded queries `wide` [KV, G n + LEAST_ROWS, D]."""
    heads, count = len(key), len(paths.rows)
    groups = acc.shape[1] // count
    asked = wide.numpy()
    results = [of.view(heads, count, groups, *of.shape[2:]).numpy() for of in (acc, top, total)]
    lists = paths.cut.lists
    if isinstance(key, QuantisedRows):
        used, lists = _used(lists)
        key, value = key[:, used], value[:, used]
    key, value = values_of(key), values_of(value)
    (keys, key_at), (values, value_at) = _flat(key), _flat(value)
    is_half = key.dtype == torch.float16

    def work(start: int, end: int) -> None:
        near(
            asked,
            keys,
            values,
            key_at,
            value_at,
            lists,
            paths.cut.counts,
            is_half,
            cap,
            start,
            end,
            *results,
        )

    spread(work, heads * count, heads * groups * int(paths.cut.counts.sum()) * wide.shape[2])


def _used(lists: Array) -> tuple[Tensor, Array]:
    """Rows of keys that lists [n, P] name, ascending; and the same lists of places among those."""
    named = np.zeros(int(lists.max()) + 1, bool)
    named[lists] = True
    places = np.cumsum(named, dtype=np.int32) - np.int32(1)
    return torch.from_numpy(np.flatnonzero(named)), places[lists]


def _flat(rows: Tensor) -> tuple[Array, Array]:
    """[KV, S, D] as one row of numbers, 16-bit floats as uint16; and its strides."""
    heads, count, size = rows.shape
    by_head, by_row = rows.stride(0), rows.stride(1)
    length = (heads - 1) * by_head + (count - 1) * by_row + size
    flat = rows.as_strided((length,), (1,))
    found = flat.numpy() if rows.dtype == torch.float32 else flat.view(torch.int16).numpy().view(np.uint16)
    return found, np.array([by_head, by_row], np.int64)
