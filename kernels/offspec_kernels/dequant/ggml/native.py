"""Compiled GGUF loops for the CPU: over the rows of a weight, and the blocks of a row.

Blocks are decoded by `native_blocks`. For bfloat16 output, 4-bit codes are looked up in a register if the CPU
supports it.
"""

from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offspec_kernels.dequant.avx512 import (
    AHEAD,
    fetch_ahead,
    has_lookups,
    look_up_planes,
    shifted_high,
    shifted_low,
)
from offspec_kernels.dequant.float4 import VALUES
from offspec_kernels.dequant.format import RowDequantizer, Shape, rows_and_columns
from offspec_kernels.dequant.ggml import LAYOUTS, Ggml
from offspec_kernels.dequant.ggml.native_blocks import DECODERS, half_at, power_of_two, scale_and_min
from offspec_kernels.dequant.ggml.reference import CODEBOOK
from offspec_kernels.dequant.native import array, carray, compile_fill, compiled, inlined
from offspec_kernels.dequant.threads import parallel_for

_CENTRED = np.arange(-8, 8, dtype=np.float32)
_FROM_ZERO = np.arange(16, dtype=np.float32)
_UNEVEN = np.array(CODEBOOK, np.float32)
_FLOATS = 2 * np.array([*VALUES, 0.0, *(-value for value in VALUES[1:])], np.float32)  # 0 has no sign


@inlined
def _look_up(bytes_: Any, values: Any, base: Any) -> None:
    """Decode blocks of a float16 and 16 bytes of codes."""
    codes, out = bytes_.ctypes.data + 2, values.ctypes.data
    for block in range(len(values) // 32):
        d = half_at(bytes_, block * 18)
        look_up_planes(codes + block * 18, base.ctypes.data, d, d, out + block * 64)


@inlined
def _q4_0(bytes_: Any, values: Any) -> None:
    _look_up(bytes_, values, _CENTRED)


@inlined
def _iq4_nl(bytes_: Any, values: Any) -> None:
    _look_up(bytes_, values, _UNEVEN)


@inlined
def _mxfp4(bytes_: Any, values: Any) -> None:
    codes, out = bytes_.ctypes.data + 1, values.ctypes.data
    for block in range(len(values) // 32):
        d = power_of_two(bytes_[block * 17])
        look_up_planes(codes + block * 17, _FLOATS.ctypes.data, d, d, out + block * 64)


@inlined
def _q4_k(bytes_: Any, values: Any) -> None:
    for block in range(len(values) // 256):
        data = bytes_[block * 144 : block * 144 + 144]
        d, lowest, packed = half_at(data, 0), half_at(data, 2), data[4:16]
        codes, out = data.ctypes.data + 16, values.ctypes.data + block * 512
        for pair in range(4):
            scale, least = scale_and_min(packed, pair * 2)
            shifted_low(codes + pair * 32, _FROM_ZERO.ctypes.data, d * scale, -(lowest * least), out)
            scale, least = scale_and_min(packed, pair * 2 + 1)
            shifted_high(codes + pair * 32, _FROM_ZERO.ctypes.data, d * scale, -(lowest * least), out + 64)
            out += 128


_LOOKUPS = {"Q4_0": _q4_0, "IQ4_NL": _iq4_nl, "MXFP4": _mxfp4, "Q4_K": _q4_k}


def _tiling_loop(kind: str) -> Callable[..., None]:
    """Return the loop for rows [start, end) of a weight: row i is row order[i] of the blocks.

    first, second, width: columns are stored as first times second pieces of `width` and output as second
    times first. A row is decoded into a buffer that stays in the cache while its pieces are reordered.
    """
    size, nbytes = LAYOUTS[kind]
    decode = DECODERS[kind]

    @compiled
    def loop(
        blocks: Any, out: Any, order: Any, across: int, first: int, second: int, width: int, start: int,
        end: int,
    ) -> None:  # fmt: skip
        values = np.empty(across * size, out.dtype)
        for row in range(start, end):
            source, target = order[row] * across * nbytes, row * across * size
            decode(blocks[source : source + across * nbytes], values)
            for piece in range(first * second):
                at, to = piece * width, target + (piece % second * first + piece // second) * width
                given, wanted = values[at : at + width], out[to : to + width]
                for i in range(width):
                    wanted[i] = given[i]

    return loop


_TILING_LOOPS = {kind: _tiling_loop(kind) for kind in LAYOUTS}


def fill_tiled(
    kind: str, order: NDArray[np.int64], tiles: tuple[int, int, int], blocks: Tensor, out: Tensor
) -> None:
    """Fill out from blocks uint8 [rows, bytes of a row]; see `ReorderedGgml`.

    out: bfloat16 or float32 [len(order), columns].
    """
    rows, columns = rows_and_columns(tuple(out.shape))
    bytes_, values, loop = array(blocks), array(out), _TILING_LOOPS[kind]
    across = columns // LAYOUTS[kind][0]
    parallel_for(
        lambda start, end: loop(bytes_, values, order, across, *tiles, start, end),
        rows,
        out.numel(),
    )


def row_dequantizer(
    format: Ggml, parts: Mapping[str, Tensor], shape: Shape, dtype: torch.dtype
) -> RowDequantizer:
    return ordered_filler(format.kind, _halves_in_turn(shape[0], format.heads), parts["blocks"], dtype)


def ordered_filler(kind: str, order: NDArray[np.int64], blocks: Tensor, dtype: torch.dtype) -> RowDequantizer:
    """Return a dequantizer; order: block row of each weight row, or empty if they are the same."""
    return RowDequantizer(_filling(kind, dtype == torch.float32), (array(blocks), order, order), len(order))


@lru_cache(maxsize=16)  # a model has few different orders in all its layers
def _halves_in_turn(rows: int, heads: int) -> NDArray[np.int64]:
    """Return the block row of each row of a weight whose heads' halves alternate; empty without heads."""
    if not heads:
        return np.empty(0, np.int64)
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


@cache
def _filling(kind: str, floats: bool) -> int:
    (size, nbytes), made = LAYOUTS[kind], np.float32 if floats else np.uint16
    looked_up = _LOOKUPS if has_lookups() and not floats else {}
    decode = looked_up.get(kind, DECODERS[kind])

    def fill(
        blocks: Any, order: Any, _: Any, rows: int, columns: int, row: int, place: int, count: int, out: Any
    ) -> None:
        source = carray(order, rows, np.int64)[row] if rows else row
        across = columns // size * nbytes
        start, end = place // size * nbytes, (place + count) // size * nbytes
        bytes_ = carray(blocks, (source + 1) * across, np.uint8)[source * across :]
        fetch_ahead(bytes_.ctypes.data + AHEAD * across + start, end - start)
        decode(bytes_[start:end], carray(out, count, made))

    return compile_fill(fill)
