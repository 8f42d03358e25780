"""Attention of a token tree on a GPU; the bits of a row depend only on its own path.

A row attends to the keys far from it in blocks, in tiles of one size, and to the near ones one by one. Its
position alone decides which keys are near and in what order they are processed (`key_ranges`). Sums over
parts of the far keys, cut at multiples of a fixed number of positions, are merged in order; near keys come
last.

Letters: see `triton`; n queries processed together.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from offspec_kernels.backend import is_interpreted
from offspec_kernels.dequant.triton import in_bfloat16
from offspec_kernels.quantized_rows import QuantizedRows, Rows
from offspec_kernels.tree_attention.arguments import AttentionArguments
from offspec_kernels.tree_attention.key_ranges import query_groups
from offspec_kernels.tree_attention.sizes import AT_ONCE, PART, SCRATCH
from offspec_kernels.tree_attention.tiles import Tiles, tiles_of
from offspec_kernels.tree_attention.triton import LOG2E, LOWEST, padded, rows_of, tanh

# Rows, keys and warps by element size in bytes and the widest head, for any call. Keys divide `sizes.STEP`.
_TILES = {
    (2, 128): (64, 64, 8),
    (2, 256): (64, 32, 8),
    (4, 64): (64, 32, 8),
    (4, 128): (32, 32, 8),
    (4, 256): (16, 32, 8),
}


@triton.jit
def _product(a, b, acc, INTERPRETED: tl.constexpr):
    """Return acc + a b. The interpreter multiplies with numpy, which rounds by place and lacks bfloat16."""
    if INTERPRETED:
        return acc + tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], 1)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _values_of(
    base, stride, scales, index, inside, dtype: tl.constexpr,
    SIZE: tl.constexpr, PADDED: tl.constexpr, SCALED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Load rows like `rows_of`; dequantize 8-bit rows with the rounding of `QuantizedRows`."""
    rows = rows_of(base, stride, index, inside, SIZE, PADDED)
    if SCALED:
        scale = tl.load(scales + index, mask=inside, other=0.0)
        rows = rows.to(tl.float32) * scale[:, None]
        if INTERPRETED and dtype == tl.bfloat16:
            rows = in_bfloat16(rows)
        rows = rows.to(dtype)
    return rows


@triton.jit
def _scores_of(products, scale, softcap, CAPPED: tl.constexpr):
    """Return scores in units of log 2."""
    scores = products * scale
    if CAPPED:
        scores = tanh(tl.minimum(scores / softcap, 40.0)) * softcap * LOG2E  # tanh is 1 there
    return scores


# Sizes that change from call to call are neither compiled in nor used for specialization.
@triton.jit(do_not_specialize=["shared", "width", "count", "first", "parts"])
def _far_keys(
    query, key, value, key_scales, value_scales, sums, tops, rows, bounds, tiles, branches,
    query_h, query_n, key_h, key_s, value_h, value_s, key_scales_h, value_scales_h,
    shared, width, count, first, parts, scale, softcap,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, PD: tl.constexpr, PE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PART: tl.constexpr, CAPPED: tl.constexpr, SCALED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Attend one part of the keys of a tile of rows, in blocks that a row uses entirely or not at all."""
    tile = tiles + tl.program_id(0) * 3
    begin, end, branch = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    head = tl.program_id(2).to(tl.int64)
    folded = begin + tl.arange(0, BM)  # [BM]
    inside = folded < end
    nth = (folded // G).to(tl.int64)
    lane = head * G + folded % G  # the query head

    # Positions of this part that a row attends to: none, unless high > low.
    part = (first + tl.program_id(1)) * PART
    low = tl.maximum(tl.load(bounds + nth * 2, mask=inside, other=0), part)
    high = tl.minimum(tl.load(bounds + nth * 2 + 1, mask=inside, other=0), part + PART)
    some = inside & (low < high)
    lowest, highest = tl.min(tl.where(some, low, part + PART), 0), tl.max(tl.where(some, high, 0), 0)

    column = tl.arange(0, PD)
    place = query + lane * query_h + tl.load(rows + nth, mask=some, other=0) * query_n
    q = tl.load(place[:, None] + column[None, :], mask=some[:, None] & (column < D)[None, :], other=0.0)
    top = tl.full([BM], LOWEST, dtype=tl.float32)
    total = tl.zeros([BM], dtype=tl.float32)
    acc = tl.zeros([BM, PE], dtype=tl.float32)
    for start in tl.range(lowest, highest, BN):
        position = start + tl.arange(0, BN)
        there = position < highest  # all of them
        behind = position - shared
        index = tl.load(branches + branch * width + behind, mask=behind >= 0, other=0)
        index = tl.where(behind >= 0, index, position)
        scales = key_scales + head * key_scales_h
        k = _values_of(key + head * key_h, key_s, scales, index, there, q.dtype, D, PD, SCALED, INTERPRETED)
        scales = value_scales + head * value_scales_h
        v = _values_of(
            value + head * value_h, value_s, scales, index, there, q.dtype, E, PE, SCALED, INTERPRETED
        )
        products = _product(q, tl.trans(k), tl.zeros([BM, BN], dtype=tl.float32), INTERPRETED)
        scores = _scores_of(products, scale, softcap, CAPPED)
        new = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new[:, None])
        shrink = tl.exp2(top - new)
        brought = _product(weights.to(v.dtype), v, acc * shrink[:, None], INTERPRETED)
        # Other rows of the tile may use this block when this row does not.
        meets = (low <= start) & (start < high)
        acc = tl.where(meets[:, None], brought, acc)
        total = tl.where(meets, total * shrink + tl.sum(weights, 1), total)
        top = tl.where(meets, new, top)

    row = (lane * count + nth) * parts + tl.program_id(1)
    column = tl.arange(0, PE)
    stored = some[:, None] & (column < E)[None, :]
    tl.store(sums + row[:, None] * E + column[None, :], acc, mask=stored)
    tl.store(tops + row * 2, top, mask=some)
    tl.store(tops + row * 2 + 1, total, mask=some)


@triton.jit(do_not_specialize=["length", "count", "first", "parts"])
def _near_keys(
    query, key, value, key_scales, value_scales, out, sums, tops, rows, bounds, lists, counts, sinks,
    query_h, query_n, key_h, key_s, value_h, value_s, key_scales_h, value_scales_h, out_h, out_n,
    length, count, first, parts, heads, scale, softcap,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, PD: tl.constexpr, PE: tl.constexpr,
    AT_ONCE: tl.constexpr, PART: tl.constexpr, CAPPED: tl.constexpr, SCALED: tl.constexpr,
    SUNK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Attend one query of one head to its listed keys, and merge the parts from `_far_keys`."""
    nth, lane = tl.program_id(0).to(tl.int64) // heads, tl.program_id(0).to(tl.int64) % heads
    node = tl.load(rows + nth)
    dtype = query.dtype.element_ty
    column = tl.arange(0, PD)
    place = query + lane * query_h + node * query_n + column
    q = tl.load(place, mask=column < D, other=0.0).to(tl.float32)

    near_top = tl.full([1], LOWEST, dtype=tl.float32)
    near_total = tl.zeros([1], dtype=tl.float32)
    near_acc = tl.zeros([PE], dtype=tl.float32)
    listed = tl.load(counts + nth)
    for start in tl.range(0, listed, AT_ONCE):
        entry = start + tl.arange(0, AT_ONCE)
        there = entry < listed
        index = tl.load(lists + nth * length + entry, mask=there, other=0)
        head = lane // G
        scales = key_scales + head * key_scales_h
        k = _values_of(key + head * key_h, key_s, scales, index, there, dtype, D, PD, SCALED, INTERPRETED).to(
            tl.float32
        )
        scales = value_scales + head * value_scales_h
        v = _values_of(
            value + head * value_h, value_s, scales, index, there, dtype, E, PE, SCALED, INTERPRETED
        )
        v = v.to(tl.float32)
        scores = _scores_of(tl.sum(q[None, :] * k, 1), scale, softcap, CAPPED)
        scores = tl.where(there, scores, float("-inf"))
        new = tl.maximum(near_top, tl.max(scores, 0))
        weights = tl.exp2(scores - new)
        shrink = tl.exp2(near_top - new)
        near_acc = near_acc * shrink + tl.sum(weights[:, None] * v, 0)
        near_total = near_total * shrink + tl.sum(weights, 0)
        near_top = new

    top = tl.full([1], LOWEST, dtype=tl.float32)
    total = tl.zeros([1], dtype=tl.float32)
    if SUNK:
        sink = tl.load(sinks + lane).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
        total = tl.exp2(sink - top)
    acc = tl.zeros([PE], dtype=tl.float32)
    column = tl.arange(0, PE)
    low, end = tl.load(bounds + nth * 2), tl.load(bounds + nth * 2 + 1)
    for part in tl.range(low // PART, (end + PART - 1) // PART):
        row = (lane * count + nth) * parts + part - first
        part_top = tl.load(tops + row * 2)
        part_total = tl.load(tops + row * 2 + 1)
        part_acc = tl.load(sums + row * E + column, mask=column < E, other=0.0)
        new = tl.maximum(top, part_top)
        shrink, share = tl.exp2(top - new), tl.exp2(part_top - new)
        acc = acc * shrink + part_acc * share
        total = total * shrink + part_total * share
        top = new
    new = tl.maximum(top, near_top)
    shrink, share = tl.exp2(top - new), tl.exp2(near_top - new)
    acc = acc * shrink + near_acc * share
    total = total * shrink + near_total * share
    place = out + lane * out_h + node * out_n + column
    tl.store(place, (acc / total).to(out.dtype.element_ty), mask=column < E)


def attend(given: AttentionArguments) -> None:
    """Run `tree_attention`. Workspace: SCRATCH, and the lists of keys near each row."""
    query, tree_mask, window, chosen = given.query, given.tree_mask, given.window, given.chosen
    heads, groups = query.shape[1], query.shape[1] // given.key.shape[1]
    size = _tile(query, given.value)[0]
    for tree, reach in given.trees():
        sums = heads * triton.cdiv(reach.keys, PART) * (given.value.shape[3] + 2) * 4  # bytes of a query
        most = max(1, SCRATCH // sums)
        name = ("tiles", tree, reach, window, groups, size, most)
        kept = tree_mask.kept if chosen is None else {}
        if name not in kept:
            cuts = query_groups(tree_mask, tree, window, most, None if chosen is None else chosen[tree])
            kept[name] = [tiles_of(cut, groups, size, query.device) for cut in cuts]
        with torch.cuda.device_of(query):
            for tiles in kept[name]:
                _attend(given, tree, tiles)


def _attend(given: AttentionArguments, tree: int, tiles: Tiles) -> None:
    query, key, value, out = given.query[tree], given.key[tree], given.value[tree], given.out[tree]
    scale, softcap, sinks = given.scale, given.softcap, given.sinks
    (heads, _, size), width, count = query.shape, value.shape[2], len(tiles.rows)
    groups, (rows, keys, warps) = heads // len(key), _tile(query, value)
    factor = scale if softcap else scale * LOG2E.value
    scaled = isinstance(key, QuantizedRows)
    (keys_at, key_scales), (values_at, value_scales) = _parts(key), _parts(value)
    places = [query, keys_at, values_at, key_scales, value_scales]
    strides = [stride for of in places[:3] for stride in of.stride()[:2]]
    strides += [key_scales.stride(0), value_scales.stride(0)]
    sums = query.new_empty(heads * count * tiles.parts, width, dtype=torch.float32)
    tops = query.new_empty(heads * count * tiles.parts, 2, dtype=torch.float32)
    if len(tiles.tiles):
        _far_keys[(len(tiles.tiles), tiles.parts, len(key))](
            *places, sums, tops, tiles.rows, tiles.bounds, tiles.tiles, tiles.branches, *strides,
            tiles.shared, tiles.branches.shape[1], count, tiles.first, tiles.parts, factor, softcap or 1.0,
            G=groups, D=size, E=width, PD=padded(size), PE=padded(width),
            BM=rows, BN=keys, PART=PART, CAPPED=softcap is not None, SCALED=scaled,
            INTERPRETED=is_interpreted(), num_warps=warps, num_stages=2, enable_fp_fusion=True,
        )  # fmt: skip
    _near_keys[(count * heads,)](
        *places, out, sums, tops, tiles.rows, tiles.bounds, tiles.lists, tiles.counts,
        query if sinks is None else sinks, *strides, *out.stride()[:2],
        tiles.lists.shape[1], count, tiles.first, tiles.parts, heads, factor, softcap or 1.0,
        G=groups, D=size, E=width, PD=padded(size), PE=padded(width),
        AT_ONCE=AT_ONCE, PART=PART, CAPPED=softcap is not None, SCALED=scaled, SUNK=sinks is not None,
        INTERPRETED=is_interpreted(), num_warps=4, num_stages=2, enable_fp_fusion=True,
    )  # fmt: skip


def _parts(rows: Rows) -> tuple[Tensor, Tensor]:
    """Return a kernel's inputs: rows and their scales, or the rows twice if they have no scales."""
    return (rows.codes, rows.scales) if isinstance(rows, QuantizedRows) else (rows, rows)


def _tile(query: Tensor, value: Rows) -> tuple[int, int, int]:
    number, widest = query.element_size(), max(query.shape[-1], value.shape[-1])
    return next(tile for (bytes_, head), tile in _TILES.items() if bytes_ == number and widest <= head)
