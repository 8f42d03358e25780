"""Product on a GPU, in tiles of one size: a program computes 64 rows by 64, 64 columns at a time.

Libraries adapt to the number of rows to keep a GPU busy: other tile sizes, columns split among programs. This
kernel does not, so a row has the same bits alone and among a thousand. In a pass over a streamed model, the
weight transfers take longer than the products anyway.

Programs with consecutive numbers share 64 rows of the weight. A GPU starts programs in the order of their
numbers, so it reads the weight from memory once and then from its cache. All programs are on the first
axis of the grid, since the other axes are limited to 65535.

Letters: T rows, K columns, N rows of the weight, G groups, P rows of all groups.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from offspec_kernels.backend import is_interpreted

_ROWS, _WIDTH, _COLUMNS = 64, 64, 64


@triton.jit
def _summed(
    rows, weight, row, there, place, width, columns, row_stride, weight_stride, column_stride,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Return [ROWS, WIDTH] float32: rows `row` [ROWS], if `there`, times rows `place` [WIDTH] of a weight."""
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS).to(tl.int64)
        inside = column < columns
        x = tl.load(
            rows + row[:, None] * row_stride + column[None, :],
            mask=there[:, None] & inside[None, :],
            other=0.0,
        )  # [ROWS, COLUMNS]
        w = tl.load(
            weight + place[None, :] * weight_stride + column[:, None] * column_stride,
            mask=(place < width)[None, :] & inside[:, None],
            other=0.0,
        )  # [COLUMNS, WIDTH]
        if INTERPRETED:  # numpy's product rounds by place and lacks bfloat16
            total += tl.sum(x.to(tl.float32)[:, :, None] * w.to(tl.float32)[None, :, :], 1)
        else:
            total = tl.dot(x, w, total, input_precision="ieee")
    return total


@triton.jit
def _put(total, bias, out, row, there, place, width, BIASED: tl.constexpr):
    """Store a tile in rows `row` [ROWS], if `there`, and columns `place` [WIDTH] of out."""
    result = total.to(out.dtype.element_ty)
    if BIASED:
        shift = tl.load(bias + place, mask=place < width, other=0.0)
        result = (result.to(tl.float32) + shift[None, :].to(tl.float32)).to(out.dtype.element_ty)
    mask = there[:, None] & (place < width)[None, :]
    tl.store(out + row[:, None] * width + place[None, :], result, mask=mask)


@triton.jit(do_not_specialize=["count"])
def _row_linear(
    rows, weight, bias, out, count, width, columns, row_stride, weight_stride, column_stride,
    BIASED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute one tile [ROWS, WIDTH] of out [T, N]."""
    sharing = tl.cdiv(count, ROWS)  # programs that read the same rows of the weight
    row = (tl.program_id(0) % sharing).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = (tl.program_id(0) // sharing).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    there = row < count
    total = _summed(
        rows, weight, row, there, place, width, columns, row_stride, weight_stride, column_stride,
        ROWS, WIDTH, COLUMNS, INTERPRETED,
    )  # fmt: skip
    _put(total, bias, out, row, there, place, width, BIASED)


@triton.jit(do_not_specialize=["tiles"])
def _grouped_linear(
    rows, weight, bias, out, sources, targets, ends, tiles, width, columns,
    row_stride, group_stride, weight_stride, column_stride, bias_stride,
    GROUPS: tl.constexpr, PADDED: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute one tile [ROWS, WIDTH] of a group's products, as in `_row_linear`; PADDED >= GROUPS."""
    tile = tl.program_id(0) % tiles  # of all rows of all groups
    place = (tl.program_id(0) // tiles).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    number = tl.arange(0, PADDED)
    end = tl.load(ends + number, mask=number < GROUPS, other=0).to(tl.int32)
    begin = tl.load(ends + number - 1, mask=(number > 0) & (number < GROUPS), other=0).to(tl.int32)
    own = (tl.maximum(end - begin, 0) + ROWS - 1) // ROWS  # tiles of each group
    last = tl.cumsum(own, 0)
    group = tl.sum(((last <= tile) & (number < GROUPS)).to(tl.int32), 0)
    if group < GROUPS:  # else this tile is beyond the last one
        chosen = number == group
        first = tl.sum(tl.where(chosen, begin + (tile - last + own) * ROWS, 0), 0)
        stop = tl.sum(tl.where(chosen, end, 0), 0)
        entry = first + tl.arange(0, ROWS)
        there = entry < stop
        row = tl.load(sources + entry, mask=there, other=0)
        total = _summed(
            rows, weight + group.to(tl.int64) * group_stride, row, there, place, width, columns,
            row_stride, weight_stride, column_stride, ROWS, WIDTH, COLUMNS, INTERPRETED,
        )  # fmt: skip
        row = tl.load(targets + entry, mask=there, other=0)
        _put(total, bias + group.to(tl.int64) * bias_stride, out, row, there, place, width, BIASED)


def row_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    count, (width, columns) = len(rows), weight.shape
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = torch.empty((count, width), dtype=rows.dtype, device=rows.device)
    if count == 0 or width == 0:
        return out
    grid = (triton.cdiv(width, _WIDTH) * triton.cdiv(count, _ROWS),)
    with torch.cuda.device_of(rows):
        _row_linear[grid](
            rows, weight, out if bias is None else bias.contiguous(), out, count, width, columns,
            rows.stride(0), weight.stride(0), weight.stride(1),
            BIASED=bias is not None, ROWS=_ROWS, WIDTH=_WIDTH, COLUMNS=_COLUMNS,
            INTERPRETED=is_interpreted(), num_warps=4, num_stages=3, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def grouped_linear(
    rows: Tensor, weights: Tensor, bias: Tensor | None, sources: Tensor, targets: Tensor, ends: Tensor
) -> Tensor:
    entries, (groups, width, columns) = len(sources), weights.shape
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = torch.zeros((entries, width), dtype=rows.dtype, device=rows.device)
    if entries == 0 or width == 0 or groups == 0:
        return out
    shift = out if bias is None else bias.contiguous()
    # Each non-empty group has at most one partial tile.
    tiles = (entries + (_ROWS - 1) * min(groups, entries)) // _ROWS
    with torch.cuda.device_of(rows):
        _grouped_linear[(triton.cdiv(width, _WIDTH) * tiles,)](
            rows, weights, shift, out, sources, targets, ends, tiles, width, columns,
            rows.stride(0), *weights.stride(), shift.stride(0),
            GROUPS=groups, PADDED=triton.next_power_of_2(groups), BIASED=bias is not None,
            ROWS=_ROWS, WIDTH=_WIDTH, COLUMNS=_COLUMNS, INTERPRETED=is_interpreted(),
            num_warps=4, num_stages=3, enable_fp_fusion=True,
        )  # fmt: skip
    return out
