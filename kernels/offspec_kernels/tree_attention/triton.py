"""Attention of a token tree on a GPU: one pass over the keys, in blocks, with a running maximum.

After FlashAttention-2 (Dao 2023, arXiv 2307.08691). If there are few queries, the key range is split among
programs (Flash-Decoding). The group of a grouped-query model is folded into the rows, so that each key is
loaded once for all heads that share it.

Letters: see `tree_mask`; G query heads per key head; a tile is BM rows (a row is one query of one head, heads
of a group adjacent) of one key head; BN keys processed at once; X splits.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from offspec_kernels.backend import is_interpreted
from offspec_kernels.tree_attention.arguments import AttentionArguments
from offspec_kernels.tree_mask import AttentionChunk

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # the maximum of an empty set; -inf would produce NaN
_WORD = tl.constexpr(64)


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Partition of the work: rows BM, keys BN (32, 64 or 128); splits X, a power of two."""

    rows: int
    keys: int
    warps: int
    stages: int
    splits: int


@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def rows_of(base, stride, index, inside, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Load rows `index` [n] of a matrix with rows of SIZE elements as [n, PADDED]; zero outside."""
    column = tl.arange(0, PADDED)
    place = base + index.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(place, mask=inside[:, None] & (column < SIZE)[None, :], other=0.0)


@triton.jit
def _take(
    q, keys_at, key_s, values_at, value_s, index, seen, there, acc, top, total, scale, softcap,
    D: tl.constexpr, E: tl.constexpr, CAPPED: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the keys `index` [BN] that are `there` to the sums acc [BM, PE] and total [BM].

    seen [BM, BN] or [1, BN]: visibility of the keys. Scores are in units of log 2; acc and total are relative
    to 2^top, the largest so far.
    """
    k = rows_of(keys_at, key_s, index, there, D, q.shape[1])
    v = rows_of(values_at, value_s, index, there, E, acc.shape[1])
    if UPCAST:
        q, k = q.to(tl.float32), k.to(tl.float32)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if CAPPED:
        scores = tanh(scores / softcap) * softcap * LOG2E
    scores = tl.where(seen & there[None, :], scores, float("-inf"))
    new = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new[:, None])
    shrink = tl.exp2(top - new)
    total = total * shrink + tl.sum(weights, 1)
    weights = weights.to(v.dtype)
    if UPCAST:
        weights, v = weights.to(tl.float32), v.to(tl.float32)
    acc = tl.dot(weights, v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, new, total


# Sizes that change from call to call are not compiled in, since compiling a kernel takes a second.
@triton.jit(
    do_not_specialize=["words_b", "words_n", "positions_b", "queries", "keys", "width", "places", "window"]
)
def _tree_attention(
    query, key, value, out, sums, tops,
    prefixes, firsts, counts, causals, words, positions, sinks,
    query_b, query_h, query_n, key_b, key_h, key_s, value_b, value_h, value_s, out_b, out_h, out_n,
    words_b, words_n, positions_b,
    queries, keys, width, places, key_heads, scale, softcap, window,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, PD: tl.constexpr, PE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, SPLIT: tl.constexpr,
    WINDOWED: tl.constexpr, CHUNKED: tl.constexpr, CAPPED: tl.constexpr, SUNK: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tree = tl.program_id(1).to(tl.int64) // key_heads
    head = tl.program_id(1).to(tl.int64) % key_heads
    split, splits = tl.program_id(2), tl.num_programs(2)
    prefix, causal = tl.load(prefixes + tree), tl.load(causals + tree)
    first, count = tl.load(firsts + tree), tl.minimum(tl.load(counts + tree), queries)

    folded = tl.program_id(0) * BM + tl.arange(0, BM)  # [BM]
    node = folded // G
    lane = head * G + folded % G  # the query head
    inside = node < count
    column = tl.arange(0, PD)
    place = query + tree * query_b + lane * query_h + node.to(tl.int64) * query_n
    q = tl.load(place[:, None] + column[None, :], mask=inside[:, None] & (column < D)[None, :], other=0.0)

    low = tl.program_id(0) * BM // G  # the tile's first query and its last
    high = tl.minimum(((tl.program_id(0) + 1) * BM - 1) // G, count - 1)
    open_end = tl.minimum(prefix + tl.minimum(causal, first + low), keys)  # all rows see the keys before this
    chain_end = tl.minimum(prefix + tl.minimum(causal, first + high + 1), keys)
    tree_start = prefix + causal
    tree_end = tl.minimum(prefix + first + high + 1, keys)
    if low >= count:  # a tile with only padding reads no keys
        open_end, chain_end, tree_end = open_end * 0, chain_end * 0, tree_end * 0
    open_start = open_end * 0
    if WINDOWED:
        at = tl.load(positions + tree * positions_b + first + node, mask=inside, other=1 << 40)
        since = at // window * window if CHUNKED else at - window + 1  # the first visible position
        # Clamped before narrowing: a tile with only padding is at 2^40.
        reach = tl.minimum(tl.maximum(tl.min(since, 0), 0), open_end.to(tl.int64))
        open_start = reach.to(tl.int32) // BN * BN

    top = tl.full([BM], LOWEST, dtype=tl.float32)
    total = tl.zeros([BM], dtype=tl.float32)
    if SUNK:  # noqa: SIM102 - this condition is known at compile time, the inner one at run time
        if split == 0:
            sink = tl.load(sinks + lane).to(tl.float32) * LOG2E
            top = tl.maximum(sink, LOWEST)
            total = tl.exp2(sink - top)
    acc = tl.zeros([BM, PE], dtype=tl.float32)
    keys_at = key + tree * key_b + head * key_h
    values_at = value + tree * value_b + head * value_h

    # Keys visible to every row of the tile: this split's share. Only the window is masked.
    share = tl.cdiv(tl.cdiv(open_end - open_start, splits), BN) * BN
    begin = open_start + split * share
    end = tl.minimum(begin + share, open_end)
    for start in tl.range(begin, end, BN):
        index = start + tl.arange(0, BN)
        seen = (index < end)[None, :]
        if WINDOWED:
            seen = seen & (since[:, None] <= index[None, :])
        acc, top, total = _take(
            q, keys_at, key_s, values_at, value_s, index, seen, index < end, acc, top, total, scale, softcap,
            D, E, CAPPED, UPCAST, PRECISION,
        )  # fmt: skip

    if split == splits - 1:
        # The chain around the diagonal.
        for start in tl.range(open_end, chain_end, BT):
            index = start + tl.arange(0, BT)
            seen = index[None, :] <= (prefix + first + node)[:, None]
            if WINDOWED:
                seen = seen & (since[:, None] <= index[None, :])
            acc, top, total = _take(
                q, keys_at, key_s, values_at, value_s, index, seen, index < chain_end, acc, top, total, scale,
                softcap, D, E, CAPPED, UPCAST, PRECISION,
            )  # fmt: skip
        # The tree: one word of each row covers a whole block.
        for start in tl.range(tree_start, tree_end, BT):
            index = start + tl.arange(0, BT)
            behind = start - tree_start
            nth = tl.zeros([BM], dtype=tl.int32) + behind // _WORD
            word = tl.load(
                words + tree * words_b + node * words_n + nth, mask=inside & (nth < width), other=0
            )
            bit = (behind % _WORD + tl.arange(0, BT)).to(tl.int64)
            seen = ((word[:, None] >> bit[None, :]) & 1) != 0
            if WINDOWED:
                known = (index < tree_end) & (index - prefix < places)
                key_at = tl.load(positions + tree * positions_b + index - prefix, mask=known, other=0)
                seen = seen & (since[:, None] <= key_at[None, :])
            acc, top, total = _take(
                q, keys_at, key_s, values_at, value_s, index, seen, index < tree_end, acc, top, total, scale,
                softcap, D, E, CAPPED, UPCAST, PRECISION,
            )  # fmt: skip

    column = tl.arange(0, PE)
    if SPLIT:
        row = ((tree * key_heads * G + lane) * queries + node) * splits + split
        stored = inside[:, None] & (column < E)[None, :]
        tl.store(sums + row[:, None] * E + column[None, :], acc, mask=stored)
        tl.store(tops + row * 2, top, mask=inside)
        tl.store(tops + row * 2 + 1, total, mask=inside)
    else:
        result = tl.where(inside[:, None], acc / tl.where(inside, total, 1.0)[:, None], 0.0)
        place = out + tree * out_b + lane * out_h + node.to(tl.int64) * out_n
        stored = (node < queries)[:, None] & (column < E)[None, :]
        tl.store(place[:, None] + column[None, :], result.to(out.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["queries"])
def _merge(
    sums, tops, out, counts, out_b, out_h, out_n, heads, queries,
    E: tl.constexpr, PE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one query of one head, each with its own maximum, into one softmax."""
    node, lane = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    tree, head = lane // heads, lane % heads
    part = tl.arange(0, SPLITS)
    column = tl.arange(0, PE)
    valid = part * 0 + node < tl.load(counts + tree)
    row = (lane * queries + node) * SPLITS + part
    top = tl.load(tops + row * 2, mask=valid, other=LOWEST)
    total = tl.load(tops + row * 2 + 1, mask=valid, other=0.0)
    share = tl.exp2(top - tl.max(top, 0))
    whole = tl.sum(total * share, 0)
    inside = valid[:, None] & (column < E)[None, :]
    acc = tl.load(sums + row[:, None] * E + column[None, :], mask=inside, other=0.0)
    result = tl.sum(acc * share[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    place = out + tree * out_b + head * out_h + node * out_n + column
    tl.store(place, result.to(out.dtype.element_ty), mask=column < E)


# Rows and keys that spill no registers, by element size in bytes and the widest head.
_TILES = {(2, 128): (128, 64), (2, 256): (64, 32), (4, 64): (64, 32), (4, 128): (32, 32), (4, 256): (16, 32)}
_ROOMY = 160 << 10  # maximum shared memory per program on server GPUs; consumer GPUs have 99 KiB


def choose_launch_config(query: Tensor, key: Tensor, value: Tensor) -> LaunchConfig:
    """Choose blocks for a shape: large tiles for many rows, splits for few."""
    batch, heads, rows, size = query.shape
    key_heads, keys = key.shape[1:3]
    folded = rows * (heads // key_heads)
    number, widest = query.element_size(), max(size, value.shape[3])
    most, wide = next(tile for (bytes_, head), tile in _TILES.items() if bytes_ == number and widest <= head)
    tile = min(most, max(16, triton.next_power_of_2(folded)))
    processors, shared = _device(query.device)
    programs = -(-folded // tile) * batch * key_heads
    return LaunchConfig(
        rows=tile,
        keys=wide,
        warps=4 if tile * wide <= 16 * 64 and number == 2 else 8,
        stages=3 if wide == 64 and shared >= _ROOMY else 2,
        splits=_floor(min(-(-2 * processors // programs), keys // 512, 64)),
    )


def _floor(count: int) -> int:
    """Return the largest power of two up to `count`, at least 1, so that few kernel variants are compiled."""
    return 1 << max(count, 1).bit_length() - 1


def _device(device: torch.device) -> tuple[int, int]:
    """Return the number of multiprocessors and the maximum bytes of shared memory per program."""
    if device.type != "cuda":
        return 1, 0
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, getattr(properties, "shared_memory_per_block_optin", 0)


def attend(given: AttentionArguments, blocks: LaunchConfig | None = None) -> None:
    """Run `tree_attention`. Workspace: B H N X (E + 2) float32 if X > 1."""
    query, key, value, tree_mask, scale, window, softcap, sinks, out, *_ = given
    assert isinstance(key, Tensor) and isinstance(value, Tensor), "quantized rows take `triton_exact`"
    batch, heads, rows, size = query.shape
    key_heads, width = key.shape[1], value.shape[3]
    cut = blocks or choose_launch_config(query, key, value)
    assert cut.splits & (cut.splits - 1) == 0, "splits are merged as a power of two"
    parts = batch * heads * rows * cut.splits if cut.splits > 1 else 0
    sums = torch.empty(parts, width, dtype=torch.float32, device=query.device)
    tops = torch.empty(parts, 2, dtype=torch.float32, device=query.device)
    places = tree_mask.words if tree_mask.position is None else tree_mask.position
    groups = heads // key_heads
    grid = (triton.cdiv(rows * groups, cut.rows), batch * key_heads, cut.splits)
    with torch.cuda.device_of(query):
        _tree_attention[grid](
            query, key, value, out, sums, tops,
            tree_mask.prefix, tree_mask.first, tree_mask.count, tree_mask.causal, tree_mask.words, places,
            query if sinks is None else sinks,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.stride()[:3],
            *tree_mask.words.stride()[:2], places.stride(0),
            rows, key.shape[2], tree_mask.words.shape[2], places.shape[1], key_heads,
            scale if softcap else scale * LOG2E.value, softcap or 1.0,
            (window.size if isinstance(window, AttentionChunk) else window) or 0,
            G=groups, D=size, E=width, PD=padded(size), PE=padded(width),
            BM=cut.rows, BN=cut.keys, BT=min(cut.keys, _WORD.value), SPLIT=cut.splits > 1,
            WINDOWED=window is not None, CHUNKED=isinstance(window, AttentionChunk),
            CAPPED=softcap is not None, SUNK=sinks is not None, UPCAST=is_interpreted(),
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            num_warps=cut.warps, num_stages=cut.stages, enable_fp_fusion=True,
        )  # fmt: skip
        if cut.splits > 1:
            _merge[(rows, batch * heads)](
                sums, tops, out, tree_mask.count, *out.stride()[:3], heads, rows,
                E=width, PE=padded(width), SPLITS=cut.splits, num_warps=4, enable_fp_fusion=True,
            )  # fmt: skip


def padded(size: int) -> int:
    """Return the columns of a tile: a power of two, at least the minimum for a product."""
    power: int = triton.next_power_of_2(size)
    return max(16, power)
