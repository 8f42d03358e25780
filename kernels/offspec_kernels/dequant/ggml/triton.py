"""GPU kernel: a program for some blocks, one value per lane, which reads only the bytes it needs.

In decoders, data is the start of each block, [BLOCKS, 1], and j indexes a block's values, [1, SIZE]. They
perform the operations of `reference` in the same order.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from offspec_kernels.dequant.format import rows_and_columns
from offspec_kernels.dequant.ggml import LAYOUTS, Ggml
from offspec_kernels.dequant.triton import put

_VALUES = 1024  # values per program


@triton.jit
def _byte(data, place, inside):
    return tl.load(data + place, mask=inside, other=0).to(tl.int32)


@triton.jit
def _signed(data, place, inside):
    return (_byte(data, place, inside) ^ 128) - 128


@triton.jit
def _half(data, place, inside):
    bits = _byte(data, place, inside) | (_byte(data, place + 1, inside) << 8)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _plane(data, j, inside, SIZE: tl.constexpr, BITS: tl.constexpr):
    """Return codes of BITS bits: the low bits of SIZE bytes, their next bits, …, then the next bytes."""
    per_byte: tl.constexpr = 8 // BITS
    byte = _byte(data, j // (SIZE * per_byte) * SIZE + j % SIZE, inside)
    return (byte >> (j // SIZE % per_byte * BITS)) & ((1 << BITS) - 1)


@triton.jit
def _looked_up(code):
    """Look up the codebook, four numbers per word."""
    word = tl.where(code < 4, 0xBFAD9881, 0xF6EADDCF)
    word = tl.where(code < 8, word, tl.where(code < 12, 0x26190D01, 0x71594535))
    return ((((word >> (code % 4 * 8)) & 255).to(tl.int32) ^ 128) - 128).to(tl.float32)


@triton.jit
def _mxfp4(data, j, inside):
    """Multiply doubled code values by half their scale."""
    exponent, code = _byte(data, 0, inside), _plane(data + 1, j, inside, 16, 4)
    bits = tl.where(exponent < 2, (1 << 21) << (exponent & 1), (exponent - 1) << 23)
    size = code & 7
    normal = ((size << 22) + (127 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 2, size.to(tl.float32), normal)
    return bits.to(tl.float32, bitcast=True) * tl.where(code <= 8, value, -value)


@triton.jit
def _by_32(data, j, inside, KIND: tl.constexpr):
    """Decode types with blocks of 32 values."""
    if KIND == "MXFP4":
        return _mxfp4(data, j, inside)
    d = _half(data, 0, inside)
    if KIND == "Q8_0":
        return d * _signed(data, 2 + j, inside).to(tl.float32)
    if KIND == "IQ4_NL":
        return d * _looked_up(_plane(data + 2, j, inside, 16, 4))
    if KIND == "Q4_0":
        return d * (_plane(data + 2, j, inside, 16, 4) - 8).to(tl.float32)
    if KIND == "Q4_1":
        return d * _plane(data + 4, j, inside, 16, 4).to(tl.float32) + _half(data, 2, inside)
    start: tl.constexpr = 2 if KIND == "Q5_0" else 4
    fifth = (_byte(data, start + j // 8, inside) >> (j % 8)) & 1
    code = _plane(data + start + 4, j, inside, 16, 4) | (fifth << 4)
    if KIND == "Q5_0":
        return d * (code - 16).to(tl.float32)
    return d * code.to(tl.float32) + _half(data, 2, inside)


@triton.jit
def _q2_k(data, j, inside):
    both = _byte(data, j // 16, inside)
    scale = _half(data, 80, inside) * (both & 15).to(tl.float32)
    least = _half(data, 82, inside) * (both >> 4).to(tl.float32)
    return scale * _plane(data + 16, j, inside, 32, 2).to(tl.float32) - least


@triton.jit
def _q3_k(data, j, inside):
    group = j // 16
    six = _plane(data + 96, group, inside, 8, 4) | (_plane(data + 104, group, inside, 4, 2) << 4)
    code = _plane(data + 32, j, inside, 32, 2) | (_plane(data, j, inside, 32, 1) << 2)
    return _half(data, 108, inside) * (six - 32).to(tl.float32) * (code - 4).to(tl.float32)


@triton.jit
def _q45_k(data, j, inside, FIVE: tl.constexpr):
    group = j // 32
    packed = data + 4
    first, second = _byte(packed, group % 4, inside), _byte(packed, group % 4 + 4, inside)
    both = _byte(packed, group % 4 + 8, inside)
    scale = tl.where(group < 4, first & 63, (both & 15) | (first >> 6 << 4)).to(tl.float32)
    least = tl.where(group < 4, second & 63, (both >> 4) | (second >> 6 << 4)).to(tl.float32)
    if FIVE:
        code = _plane(data + 48, j, inside, 32, 4) | (_plane(data + 16, j, inside, 32, 1) << 4)
    else:
        code = _plane(data + 16, j, inside, 32, 4)
    d, lowest = _half(data, 0, inside), _half(data, 2, inside)
    return d * scale * code.to(tl.float32) - lowest * least


@triton.jit
def _q6_k(data, j, inside):
    code = _plane(data, j, inside, 64, 4) | (_plane(data + 128, j, inside, 32, 2) << 4)
    scale = _half(data, 208, inside) * _signed(data, 192 + j // 16, inside).to(tl.float32)
    return scale * (code - 32).to(tl.float32)


@triton.jit
def _iq4_xs(data, j, inside):
    group = j // 32
    two = (_byte(data, 2 + group // 4, inside) >> (group % 4 * 2)) & 3
    six = ((_byte(data, 4 + group // 2, inside) >> (group % 2 * 4)) & 15) | (two << 4)
    scale = _half(data, 0, inside) * (six - 32).to(tl.float32)
    return scale * _looked_up(_plane(data + 8, j, inside, 16, 4))


@triton.jit
def _by_256(data, j, inside, KIND: tl.constexpr):
    """Decode types with blocks of 256 values."""
    if KIND == "Q2_K":
        return _q2_k(data, j, inside)
    if KIND == "Q3_K":
        return _q3_k(data, j, inside)
    if KIND == "Q6_K":
        return _q6_k(data, j, inside)
    if KIND == "IQ4_XS":
        return _iq4_xs(data, j, inside)
    return _q45_k(data, j, inside, KIND == "Q5_K")


@triton.jit
def _ggml(
    blocks, out, count, across, half,
    KIND: tl.constexpr, BYTES: tl.constexpr, SIZE: tl.constexpr, BLOCKS: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    inside = block < count
    j = tl.arange(0, SIZE)[None, :]
    data = blocks + block * BYTES
    values = _by_32(data, j, inside, KIND) if SIZE == 32 else _by_256(data, j, inside, KIND)
    if TURNED:  # the rows of heads' halves alternate
        row = block // across
        within = row % (2 * half)
        block = (row - within + within % 2 * half + within // 2) * across + block % across
    put(out, block * SIZE + j, values, inside)


def fill(format: Ggml, parts: Mapping[str, Tensor], out: Tensor) -> None:
    kind, heads, blocks = format.kind, format.heads, parts["blocks"]
    size, nbytes = LAYOUTS[kind]
    rows, columns = rows_and_columns(tuple(out.shape))
    count = out.numel() // size
    with torch.cuda.device_of(out):
        _ggml[(triton.cdiv(count * size, _VALUES),)](
            blocks, out, count, columns // size, rows // (2 * heads) if heads else 0,
            KIND=kind, BYTES=nbytes, SIZE=size, BLOCKS=_VALUES // size, TURNED=heads > 0,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
