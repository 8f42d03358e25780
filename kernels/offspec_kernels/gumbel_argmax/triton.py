"""GPU kernels of the sampling maximum: one read of the logits, noise generated once per position.

A program takes a block of the vocabulary and up to `_ROWS` rows that share a position. It generates the
block's noise, keeps it in registers and processes the rows. A small second kernel compares the results of all
blocks of a row.
Scores are compared as the integer keys of `triton_sort_keys`, which contain the token's id.
"""

import torch
import triton
import triton.language as tl

from offspec_kernels.gumbel_argmax.arguments import ArgmaxArguments, ArgmaxResult, empty_result
from offspec_kernels.noise import LOW
from offspec_kernels.noise.triton import gumbel_run
from offspec_kernels.transfer import upload
from offspec_kernels.triton_sort_keys import NOTHING, key_id, key_score, keys

_BLOCK = 1024
_ROWS = 16


@triton.jit(do_not_specialize=["slots", "key_low", "key_high"])
def _within_blocks(
    logits, stride, groups, least, last_tie, table, firsts, seconds, size, temperature,
    slots, key_low, key_high,
    NOISY: tl.constexpr, KEPT: tl.constexpr, DIVIDED: tl.constexpr, FILTERED: tl.constexpr,
    TIES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write firsts and seconds, [N, blocks] int64: the two largest keys of each block."""
    # Grid: blocks of the vocabulary, groups of rows.
    block, blocks = tl.program_id(0), tl.num_programs(0)
    group = groups + tl.program_id(1) * (2 + ROWS)  # position, number of rows, rows
    ids = block * BLOCK + tl.arange(0, BLOCK)
    inside = ids < size
    noise = tl.zeros([BLOCK], tl.float32)
    if KEPT:
        noise = tl.load(table + (tl.load(group) % slots) * size + ids, mask=inside, other=0.0)
    elif NOISY:
        runs = block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
        noise = gumbel_run(runs, tl.load(group), key_low, key_high)
    for index in range(tl.load(group + 1).to(tl.int32)):
        row = tl.load(group + 2 + index)
        x = tl.load(logits + row * stride + ids, mask=inside, other=0.0).to(tl.float32)
        if DIVIDED:
            x = tl.div_rn(x, temperature)
        if FILTERED:
            border = tl.load(least + row)
            out = x < border
            if TIES:
                out = out | ((x == border) & (ids > tl.load(last_tie + row)))
            x = tl.where(out, float("-inf"), x)
        if NOISY:
            x += noise
        scores = tl.where(inside, keys(x, ids), NOTHING)
        first = tl.max(scores, axis=0)
        tl.store(firsts + row * blocks + block, first)
        tl.store(seconds + row * blocks + block, tl.max(tl.where(scores == first, NOTHING, scores), axis=0))


@triton.jit
def _across_blocks(firsts, seconds, token, best, second, blocks, BLOCKS: tl.constexpr):
    """Reduce to the two largest keys of a row, and decode them."""
    row = tl.program_id(0).to(tl.int64)
    places = row * blocks + tl.arange(0, BLOCKS)
    inside = tl.arange(0, BLOCKS) < blocks
    scores = tl.load(firsts + places, mask=inside, other=NOTHING)
    runners_up = tl.load(seconds + places, mask=inside, other=NOTHING)
    first = tl.max(scores, axis=0)
    other = tl.max(tl.where(scores == first, runners_up, scores), axis=0)
    tl.store(token + row, key_id(first))
    tl.store(best + row, key_score(first))
    tl.store(second + row, tl.where(other == NOTHING, float("-inf"), key_score(other)))


def pick(work: ArgmaxArguments) -> ArgmaxResult:
    logits, device = work.logits, work.logits.device
    count, size = logits.shape
    picks = empty_result(count, device)
    blocks = triton.cdiv(size, _BLOCK)
    firsts, seconds = torch.empty(2, count, blocks, dtype=torch.int64, device=device)
    (groups,) = upload([_groups(work)], device)
    seed = work.seed or 0
    with torch.cuda.device_of(logits):
        _within_blocks[(blocks, len(groups))](
            logits, logits.stride(0), groups, work.min_score, work.last_tie, work.table, firsts, seconds,
            size, work.temperature, 1 if work.table is None else len(work.table), seed & LOW, seed >> 32,
            NOISY=work.positions is not None, KEPT=work.table is not None, DIVIDED=work.temperature != 1.0,
            FILTERED=work.min_score is not None, TIES=work.last_tie is not None, ROWS=_ROWS, BLOCK=_BLOCK,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        _across_blocks[(count,)](
            firsts, seconds, *picks, blocks,
            BLOCKS=triton.next_power_of_2(blocks), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return picks


def _groups(work: ArgmaxArguments) -> list[list[int]]:
    """Group rows by position, up to `_ROWS` each: [position, number of rows, the rows, padded with 0]."""
    groups = []
    for position, rows in work.rows_by_position():
        for start in range(0, len(rows), _ROWS):
            some = rows[start : start + _ROWS]
            groups.append([position or 0, len(some), *some, *[0] * (_ROWS - len(some))])
    return groups
