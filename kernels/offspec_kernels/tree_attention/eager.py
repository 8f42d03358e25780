"""Attention of a token tree on a CPU; the bits of a row depend only on its own path.

A row attends to the keys near it one by one, in a compiled loop (`native`). It attends to the others in
products, of bfloat16 if the CPU supports it (`brgemm_tiles`), else of float32 (`blocks`): in order of
position, cut by position alone (`key_ranges`).

Letters: see `tree_mask`; G query heads per key head, n queries processed together, E elements of a value.
"""

from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from offspec_kernels.dequant.native import Array
from offspec_kernels.dequant.threads import parallel_for
from offspec_kernels.quantized_rows import QuantizedRows, Rows, values_of
from offspec_kernels.tree_attention import blocks, brgemm_tiles
from offspec_kernels.tree_attention.arguments import AttentionArguments
from offspec_kernels.tree_attention.blocks import SoftmaxState
from offspec_kernels.tree_attention.key_ranges import QueryGroup, query_groups
from offspec_kernels.tree_attention.native import LOG2E, attend_listed_keys
from offspec_kernels.tree_attention.sizes import KEPT, LEAST_ROWS, SMALL, max_rows


def attend(given: AttentionArguments) -> None:
    """Run `tree_attention`. Workspace: see `scratch_bytes`."""
    query, window, chosen = given.query, given.window, given.chosen
    heads, groups = query.shape[1], query.shape[1] // given.key.shape[1]
    plain = not given.exact and not given.softcap and given.sinks is None and chosen is None
    plain = plain and query.shape[3] == given.value.shape[3]
    for tree, reach in given.trees():
        if plain and groups * reach.count * reach.keys <= SMALL:
            _fused(given, tree)
            continue
        name, kept = ("cuts", tree, reach, window, groups), given.tree_mask.kept if chosen is None else {}
        if name not in kept:
            some = None if chosen is None else chosen[tree]
            kept[name] = query_groups(given.tree_mask, tree, window, max_rows(heads, groups), some)
        for cut in kept[name]:
            _attend_rows(given, tree, cut)


def _fused(given: AttentionArguments, tree: int) -> None:
    """Use torch's attention, with a mask shared by all layers of a pass."""
    query, key, value, tree_mask = given.query[tree], given.key[tree], given.value[tree], given.tree_mask
    reach, heads = tree_mask.extents()[tree], len(query)
    groups = heads // len(key)
    name = ("bias", tree, reach, groups, given.window, query.dtype)
    bias = tree_mask.kept.get(name)
    if bias is None:
        seen = tree_mask.visible(tree, (0, reach.count), (0, reach.keys), given.window)
        bias = torch.zeros(seen.shape, dtype=query.dtype, device=query.device)
        bias = bias.masked_fill_(seen.logical_not_(), float("-inf")).repeat(groups, 1)
        if sum(mask.nbytes for mask in tree_mask.kept.values() if isinstance(mask, Tensor)) <= KEPT:
            tree_mask.kept[name] = bias
    folded = query[:, : reach.count].reshape(1, len(key), groups * reach.count, query.shape[2])
    keys, values = (values_of(of[None, :, : reach.keys]) for of in (key, value))
    done = F.scaled_dot_product_attention(folded, keys, values, attn_mask=bias, scale=given.scale)
    given.out[tree, :, : reach.count] = done.view(heads, reach.count, -1)


def _attend_rows(given: AttentionArguments, tree: int, cut: QueryGroup) -> None:
    query, key, value, pieces = given.query[tree], given.key[tree], given.value[tree], cut.key_ranges
    factor, cap = given.scale * LOG2E, (given.softcap or 0.0) * LOG2E
    rows, heads, count, size = torch.from_numpy(cut.rows), len(key), len(cut.rows), query.shape[2]
    groups = len(query) // heads
    asked = query[:, rows].view(heads, groups, count, size).transpose(1, 2)
    folded = query.new_zeros(heads, count * groups + LEAST_ROWS, size)
    folded[:, : count * groups] = asked.reshape(heads, -1, size)
    wide = folded.float().mul_(factor)
    acc = torch.empty(heads, count * groups, value.shape[2], dtype=torch.float32)
    sums = SoftmaxState(acc, *torch.empty(2, heads, count * groups, dtype=torch.float32).unbind())
    _take_near(wide, key, value, cut, cap, sums)
    if given.sinks is not None:
        sinks = (given.sinks.float() * LOG2E).view(heads, 1, groups)
        sums.add_sinks(sinks.expand(-1, count, -1).reshape(heads, -1))
    narrow = query.dtype == key.dtype == torch.bfloat16 and not cap and size % 2 == 0
    if pieces and narrow and brgemm_tiles.is_supported():
        brgemm_tiles.accumulate(folded, key, value, pieces, groups, factor, sums)
    elif pieces:
        blocks.accumulate(wide, key, value, pieces, groups, cap, sums)
    acc /= sums.running_sum[:, :, None]
    done = acc.view(heads, count, groups, -1).transpose(1, 2).reshape(heads * groups, count, -1)
    given.out[tree][:, rows] = done.to(given.out.dtype)


def _take_near(wide: Tensor, key: Rows, value: Rows, cut: QueryGroup, cap: float, sums: SoftmaxState) -> None:
    """Attend to each row's listed keys, for folded queries `wide` [KV, G n + LEAST_ROWS, D]."""
    heads, count, lists, counts = len(key), len(cut.rows), cut.lists, cut.counts
    groups = sums.acc.shape[1] // count
    if isinstance(key, QuantizedRows):
        used, lists = _used(lists)
        key, value = key[:, used], value[:, used]
    key, value = values_of(key), values_of(value)
    (keys, key_at), (values, value_at) = _flat(key), _flat(value)
    acc, top, total = (
        of.view(heads, count, groups, *of.shape[2:]).numpy()
        for of in (sums.acc, sums.running_max, sums.running_sum)
    )
    products = heads * groups * int(counts.sum()) * wide.shape[2]
    is_half = key.dtype == torch.float16
    near_keys = partial(
        attend_listed_keys, wide.numpy(), keys, values, key_at, value_at, lists, counts, is_half, cap
    )
    parallel_for(partial(near_keys, acc, top, total), heads * count, products)


def _used(lists: Array) -> tuple[Tensor, Array]:
    """Return the key rows named in lists [n, P], ascending, and the lists as indices into those rows."""
    named = np.zeros(int(lists.max()) + 1, bool)
    named[lists] = True
    places = np.cumsum(named, dtype=np.int32) - np.int32(1)
    return torch.from_numpy(np.flatnonzero(named)), places[lists]


def _flat(rows: Tensor) -> tuple[Array, Array]:
    """Return [KV, S, D] flat, 16-bit floats as uint16, with its strides."""
    heads, count, size = rows.shape
    by_head, by_row = rows.stride(0), rows.stride(1)
    length = (heads - 1) * by_head + (count - 1) * by_row + size
    flat = rows.as_strided((length,), (1,))
    found = flat.numpy() if rows.dtype == torch.float32 else flat.view(torch.int16).numpy().view(np.uint16)
    return found, np.array([by_head, by_row], np.int64)
