"""Weights of random bits with scales that files have, and some that none should have."""

import math
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offspec_kernels.backend import Backend
from offspec_kernels.dequant import Format, dequantize
from tests.support.kernel_device import device_of

PATHS: list[Backend] = ["reference", "eager", "triton"]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Subnormal ones of float16 only: triton's interpreter takes those of bfloat16 for others.
ODD = (math.inf, -math.inf, math.nan, 65504.0, -300.0, 6e-8, -6e-8, 6e-5, 0.0)


def library(name: str) -> Any:
    """Import a module of a quantization library; skip the test on a machine that lacks it."""
    return pytest.importorskip(name, reason=f"needs {name.partition('.')[0]}")


def has_library_or_skip(name: str, path: Backend) -> bool:
    """Return whether a library is installed; without it only kernels are tested, against the reference path.

    That path is compared with the library wherever there is one.
    """
    found = find_spec(name) is not None
    if not found and path != "triton":
        pytest.skip(f"needs {name}")
    return found


def random_bytes(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def words(seed: int, *shape: int) -> Tensor:
    """int32 of random bits."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, generator=generator).int()


def scales(seed: int, dtype: torch.dtype, *shape: int, odd: float = 0.0) -> Tensor:
    """A share `odd` of them are large, subnormal, negative or no numbers."""
    generator = torch.Generator().manual_seed(seed)
    usual = torch.rand(shape, generator=generator) * 0.02
    drawn = torch.tensor(ODD)[torch.randint(len(ODD), shape, generator=generator)]
    return torch.where(torch.rand(shape, generator=generator) < odd, drawn, usual).to(dtype)


def unpacked(
    format: Format, parts: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype, path: Backend
) -> Tensor:
    """Return the values that a path makes, on its own device, back on the CPU."""
    device = device_of(path)
    there = {name: part.to(device) for name, part in parts.items()}
    out = torch.full((math.prod(shape),), math.nan, dtype=dtype, device=device)
    with np.errstate(all="ignore"):  # of the interpreter
        found = dequantize(format, there, shape, out, path=path)
    assert found.shape == shape and found.data_ptr() == out.data_ptr()
    return found.cpu()


def same(found: Tensor, wanted: Tensor) -> None:
    """The same bits; any number that is none is as good as another."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    number = ~wanted.isnan()
    integers = {2: torch.int16, 4: torch.int32}[wanted.itemsize]
    assert torch.equal(number, ~found.isnan())
    assert torch.equal(found[number].view(integers), wanted[number].view(integers))


def check(
    format: Format, parts: Mapping[str, Tensor], shape: tuple[int, ...], wanted: Tensor, path: Backend
) -> None:
    """The path makes these float32 values, and rounds them once to the dtype of memory that had none."""
    for dtype in (torch.float32, torch.bfloat16):
        same(unpacked(format, parts, shape, dtype, path), wanted.to(dtype))


def check_cut(
    format: Format, parts: Mapping[str, Tensor], shape: tuple[int, ...], whole: Tensor, path: Backend
) -> None:
    """The second element of the first dimension by itself is what it is among all."""
    found = format.slice_rows(shape, 1, 2)
    assert found is not None
    kind, ranges = found
    alone = {name: part[slice(*ranges[name])].contiguous() for name, part in parts.items()}
    same(unpacked(kind, alone, (1, *shape[1:]), torch.float32, path), whole[1:2])
