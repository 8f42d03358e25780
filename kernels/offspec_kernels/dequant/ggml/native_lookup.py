"""Decoders of the types whose codes of 4 bits are looked up in a register: uint8 to bfloat16 as uint16."""

from typing import Any

import numpy as np

from offspec_kernels.dequant.float4 import VALUES
from offspec_kernels.dequant.ggml.native_k import scale_and_least
from offspec_kernels.dequant.ggml.native_legacy import half_at, power_of_two
from offspec_kernels.dequant.ggml.reference import CODEBOOK
from offspec_kernels.dequant.native import inlined
from offspec_kernels.dequant.registers import look_up_planes, shifted_high, shifted_low

_CENTRED = np.arange(-8, 8, dtype=np.float32)
_FROM_ZERO = np.arange(16, dtype=np.float32)
_UNEVEN = np.array(CODEBOOK, np.float32)
_FLOATS = 2 * np.array([*VALUES, 0.0, *(-value for value in VALUES[1:])], np.float32)  # 0 has no sign


@inlined
def _look_up(bytes_: Any, values: Any, base: Any) -> None:
    """Blocks of a float16 and 16 bytes of codes."""
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
            scale, least = scale_and_least(packed, pair * 2)
            shifted_low(codes + pair * 32, _FROM_ZERO.ctypes.data, d * scale, -(lowest * least), out)
            scale, least = scale_and_least(packed, pair * 2 + 1)
            shifted_high(codes + pair * 32, _FROM_ZERO.ctypes.data, d * scale, -(lowest * least), out + 64)
            out += 128


DECODERS = {"Q4_0": _q4_0, "IQ4_NL": _iq4_nl, "MXFP4": _mxfp4, "Q4_K": _q4_k}
