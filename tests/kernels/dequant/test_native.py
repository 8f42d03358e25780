"""What compiled loops are made of rounds as torch does, and their threads are waited for."""

import math
from collections.abc import Callable

import numba
import numpy as np
import pytest
import torch
from torch import Tensor

from offspec_kernels.dequant.native import array, compiled, half, in_bfloat16, in_half, put
from tests.kernels.dequant.cases import same


@numba.njit
def _put_all(values, out):  # type: ignore[no-untyped-def]
    for i in range(len(values)):
        put(out, i, values[i])


@numba.njit
def _half_all(bits, out):  # type: ignore[no-untyped-def]
    for i in range(len(bits)):
        out[i] = half(bits[i])


@numba.njit
def _round_all(values, halves, brains):  # type: ignore[no-untyped-def]
    for i in range(len(values)):
        halves[i] = in_half(values[i])
        brains[i] = in_bfloat16(values[i])


def float32s() -> Tensor:
    """Of any bits; those half-way between two floats of 16 bits, and their neighbours; and small ones."""
    generator = torch.Generator().manual_seed(0)
    any_bits = torch.randint(-(2**31), 2**31, (1 << 18,), generator=generator)
    upper = torch.randint(-(2**15), 2**15, (1 << 14,), generator=generator) << 16
    ties = torch.cat([upper + 0x8000 + off for off in (-1, 0, 1)])
    upper = torch.randint(-(2**18), 2**18, (1 << 14,), generator=generator) << 13
    ties = torch.cat([ties, *(upper + 0x1000 + off for off in (-1, 0, 1))])
    signs = torch.tensor([0, 0x7F800000, 0x7F800001, 0x7FFFFFFF, 0x7FC00000, 0x7F7FFFFF, 1, 0x007FFFFF])
    bits = torch.cat([any_bits, ties, signs, signs - 2**31]).int()
    near = torch.tensor([65519.9961, 65520.0, 65504.0, 2.0**-14, 2.0**-25, 2.0**-24 * 1.5, 6.1e-5, 0.0])
    small = torch.randn(1 << 14, generator=generator) * 1e-5
    return torch.cat([bits.view(torch.float32), near, -near, small])


def test_rounding_is_that_of_torch() -> None:
    values = float32s()
    for dtype in (torch.bfloat16, torch.float32):
        out = torch.zeros(len(values), dtype=dtype)
        _put_all(array(values), array(out))
        same(out, values.to(dtype))
    halves, brains = torch.zeros(2, len(values))
    _round_all(array(values), array(halves), array(brains))
    same(halves, values.half().float())
    same(brains, values.bfloat16().float())


def test_every_float16() -> None:
    wanted = torch.arange(1 << 16, dtype=torch.int32).short().view(torch.float16)
    found = torch.zeros(1 << 16)
    _half_all(array(wanted), array(found))
    same(found, wanted.float())


@pytest.mark.parametrize(
    ("dtype", "seen"),
    [
        (torch.bfloat16, np.uint16),
        (torch.float16, np.uint16),
        (torch.float8_e4m3fn, np.uint8),
        (torch.uint8, np.uint8),
        (torch.int8, np.int8),
        (torch.int32, np.int32),
        (torch.float32, np.float32),
    ],
)
def test_an_array_is_the_tensors_memory(dtype: torch.dtype, seen: type) -> None:
    tensor = torch.nn.Parameter(torch.zeros(2, 3, dtype=dtype), requires_grad=False)
    view = array(tensor)
    assert view.dtype == seen and view.shape == (6,)
    view[4] = 1
    assert (tensor.view(-1).view(torch.uint8) != 0).sum() >= 1


def test_without_a_place_for_compiled_code() -> None:
    """A function that is in no file is kept nowhere, as where nothing can be written."""
    names = dict[str, Callable[[int], int]]()
    exec(compile("def twice(number):\n    return 2 * number\n", "<nowhere>", "exec"), names)
    with pytest.raises(RuntimeError, match="no locator available"):
        numba.njit(cache=True)(names["twice"])
    assert compiled(names["twice"])(math.floor(21.5)) == 42
