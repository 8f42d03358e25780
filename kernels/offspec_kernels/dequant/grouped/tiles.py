"""Products of many rows with 4-bit codes in the layout of torch's own product of such weights.

torch's product dequantizes again for every few rows. Here a thread dequantizes 64 outputs, a piece of the
inputs at a time with pairs of inputs interleaved, and oneDNN's small product multiplies all rows by them
while they are in its cache. Codes of 64 outputs are stored together: 32 bytes per input, in which byte j has
the code of output j in its low half and that of output j + 32 in its high half.

Letters: T rows, N outputs, K inputs, 64 weights per group.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from offspec_kernels.dequant.native import carray, claim, compile_job, inlined, pointer, put
from offspec_kernels.dequant.threads import run_parallel
from offspec_kernels.row_linear.brgemm import call_product, call_release, find_brgemm

TILE = 64
_PIECE = 1024  # inputs
_ROWS, _FEW = 64, 8  # rows of a product; the remainder uses multiples of 8: oneDNN keeps code for each count
_WORDS = 13  # argument words of the loop: two counters, addresses and sizes


def multiply(rows: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Return [T, N], the product of rows [T, K] and a weight.

    Args:
        rows: bfloat16, K a multiple of 64.
        codes: Result of `_convert_weight_to_int4pack_for_cpu` if `has_tiles`.
        scales: [K / 64, N, 2] bfloat16, N a multiple of 64: step and value of code 8 for each group.
    """
    found = find_brgemm()
    assert found is not None, "ask has_tiles first"
    (count, inputs), outputs = rows.shape, scales.shape[1]
    out = torch.empty(count, outputs, dtype=rows.dtype)
    rows = F.pad(rows, (0, 0, 0, -count % _FEW)).contiguous()
    own = TILE * (2 * _PIECE + 4 * len(rows) + 8)
    memory = torch.empty(torch.get_num_threads() * own, dtype=torch.uint8)
    tensors = (codes, scales, rows, memory, out)
    job = np.array((0, 0, *found, *(of.data_ptr() for of in tensors), count, inputs, outputs, own))
    assert len(job) == _WORDS
    run_parallel(compile_job(_multiply), job, tensors, inputs * outputs)
    return out


@inlined
def _pair(first: Any, second: Any) -> Any:
    """Pack two numbers as bfloat16, the first in the lower half."""
    return np.uint32(_near(first) >> np.uint32(16)) | np.uint32(_near(second) & np.uint32(0xFFFF0000))


@inlined
def _near(value: Any) -> Any:
    """Round like `in_bfloat16` but without handling NaN, which would take a sixth of the total time."""
    bits = np.float32(value).view(np.uint32)
    even = np.uint32(bits >> np.uint32(16)) & np.uint32(1)
    return np.uint32(bits + np.uint32(0x7FFF) + even)


@inlined
def _fill(codes: Any, pairs: Any, steps: Any, bases: Any, made: Any) -> None:
    """Dequantize a group: codes of 64 inputs, scale pairs of 64 outputs; made: uint32 [32, 64] pairs."""
    for j in range(TILE):
        both = np.uint32(pairs[j])
        steps[j] = np.uint32(both << np.uint32(16)).view(np.float32)
        bases[j] = np.uint32(both & np.uint32(0xFFFF0000)).view(np.float32) - np.float32(8.0) * steps[j]
    low_steps, low_bases, high_steps, high_bases = steps[:32], bases[:32], steps[32:64], bases[32:64]
    for k in range(32):
        one, two = codes[64 * k : 64 * k + 32], codes[64 * k + 32 : 64 * k + 64]
        low, high = made[64 * k : 64 * k + 32], made[64 * k + 32 : 64 * k + 64]
        for j in range(32):
            first = np.float32(np.int32(one[j] & 15)) * low_steps[j] + low_bases[j]
            second = np.float32(np.int32(two[j] & 15)) * low_steps[j] + low_bases[j]
            low[j] = _pair(first, second)
        for j in range(32):
            first = np.float32(np.int32(one[j] >> 4)) * high_steps[j] + high_bases[j]
            second = np.float32(np.int32(two[j] >> 4)) * high_steps[j] + high_bases[j]
            high[j] = _pair(first, second)


def _multiply(job: Any) -> None:
    """Multiply tiles of outputs, which threads claim one by one."""
    words = carray(job, _WORDS, np.int64)
    product, release, codes, scales, rows, memory, target, count, inputs, outputs, size_of_own = words[2:]
    padded = (count + _FEW - 1) // _FEW * _FEW
    own = memory + claim(words[1:].ctypes.data) * size_of_own
    panel = carray(pointer(own), _PIECE // 2 * TILE, np.uint32)
    sums = carray(pointer(own + 2 * _PIECE * TILE), padded * TILE, np.float32)
    out = carray(pointer(target), count * outputs, np.uint16)
    scale = carray(pointer(own + TILE * (2 * _PIECE + 4 * padded)), 2 * TILE, np.float32)
    steps, bases = scale[:TILE], scale[TILE:]
    while True:
        tile = claim(words.ctypes.data)
        if tile * TILE >= outputs:
            break
        for place in range(0, inputs, _PIECE):
            size = min(_PIECE, inputs - place)
            for group in range(place // 64, (place + size) // 64):
                bytes_ = carray(pointer(codes + (tile * inputs + 64 * group) * 32), 2048, np.uint8)
                pairs = carray(pointer(scales + (group * outputs + tile * TILE) * 4), TILE, np.uint32)
                _fill(bytes_, pairs, steps, bases, panel[(64 * group - place) * 32 :])
            for first in range(0, padded, _ROWS):
                given, high = rows + 2 * (first * inputs + place), min(padded - first, _ROWS)
                call_product(product, (
                    high, TILE, size, inputs, TILE, TILE, 1 if place else 0, given, panel.ctypes.data,
                    sums[first * TILE :].ctypes.data, 1,
                ))  # fmt: skip
        for row in range(count):
            near, made = sums[row * TILE : (row + 1) * TILE], out[row * outputs + tile * TILE :]
            for j in range(TILE):
                put(made, j, near[j])
    call_release(release, (1,))


@cache
def has_tiles() -> bool:
    """Return whether the CPU has the product, and this torch lays codes out as described here."""
    if find_brgemm() is None:
        return False
    codes = torch.arange(128 * 64, dtype=torch.int32).view(128, 64).mul(7).remainder(17).remainder(16)
    scales = torch.tensor([1.0, 8.0]).expand(1, 128, 2).bfloat16().contiguous()
    try:
        laid = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 2)
        found = multiply(torch.eye(64).bfloat16(), laid, scales)
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False
    return torch.equal(found.T, codes.bfloat16())
