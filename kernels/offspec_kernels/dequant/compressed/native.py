"""Compiled compressed-tensors loops for the CPU."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offspec_kernels.dequant.compressed import CompressedInt
from offspec_kernels.dequant.native import array, compiled, inlined, put
from offspec_kernels.dequant.scaled.native import rounded, rounding_of, unpack_across, unpack_stream
from offspec_kernels.dequant.threads import parallel_for


@inlined
def _row(codes: Any, zeros: Any, scales: Any, index: Any, kind: Any, out: Any) -> None:
    """Dequantize a row; zeros, scales: one per group; index: group of each column, or empty."""
    for column in range(len(index)):
        group = index[column]
        difference = np.float32(np.int32(np.int32(codes[column]) - np.int32(zeros[group])))
        put(out, column, rounded(difference * scales[group], kind))
    if len(index):
        return
    size = len(out) // len(scales)
    for group in range(len(scales)):
        zero, scale = np.int32(zeros[group]), scales[group]
        some, values = codes[group * size : group * size + size], out[group * size : group * size + size]
        for j in range(len(values)):
            put(values, j, rounded(np.float32(np.int32(np.int32(some[j]) - zero)) * scale, kind))


@compiled
def _fill_bytes(
    codes: Any, zeros: Any, scales: Any, index: Any, bits: int, kind: int, out: Any, start: int, end: int
) -> None:
    for row in range(start, end):
        _row(codes[row], zeros[row], scales[row], index, kind, out[row])


@compiled
def _fill_words(
    words: Any, zeros: Any, scales: Any, index: Any, bits: int, kind: int, out: Any, start: int, end: int
) -> None:
    codes = np.empty(out.shape[1], np.uint8)
    for row in range(start, end):
        unpack_stream(words[row], bits, codes)
        _row(codes, zeros[row], scales[row], index, kind, out[row])


@compiled
def _unpack_zeros(words: Any, bits: int, zeros: Any) -> None:
    """Unpack words [words for rows, groups] to zeros [rows, groups]."""
    for row in range(len(zeros)):
        word = row * bits >> 5
        unpack_across(words[word], words[min(word + 1, len(words) - 1)], bits, row * bits & 31, zeros[row])


def _zeros(format: CompressedInt, parts: Mapping[str, Tensor], rows: int, groups: int) -> Tensor:
    """Return zero points [rows, groups] in the dtype of unpacked codes."""
    if not (format.zero_point and format.packs_zeros):
        return format.zeros(parts, rows, groups).to(torch.uint8 if format.packed else torch.int8)
    zeros = torch.empty(rows, groups, dtype=torch.uint8)
    words = array(parts["zero_point"]).reshape(-1, groups)
    _unpack_zeros(words, format.bits, array(zeros).reshape(rows, groups))
    return zeros


def fill(format: CompressedInt, parts: Mapping[str, Tensor], out: Tensor) -> None:
    """Fill out: [rows, columns]."""
    format.check_values(parts)
    rows, columns = out.shape
    groups, bits = columns // (format.group or columns), format.bits
    scales = parts["scale"].float().view(-1, groups)
    kind = rounding_of(scales, format.scales, 255, out.dtype)
    zeros, scales = _zeros(format, parts, rows, groups), scales.expand(rows, groups)
    index = array(parts["g_idx"] if format.act_order else torch.empty(0, dtype=torch.int32))
    tables = (array(each.contiguous()).reshape(rows, -1) for each in (parts["weight"], zeros, scales, out))
    words, zero, scale, values = tables
    loop = _fill_words if format.packed else _fill_bytes
    parallel_for(
        lambda start, end: loop(words, zero, scale, index, bits, kind, values, start, end), rows, out.numel()
    )
