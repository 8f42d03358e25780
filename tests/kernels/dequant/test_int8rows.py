"""LLM.int8(), bit for bit as bitsandbytes makes values of it, on every path."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offspec_kernels.backend import Backend
from offspec_kernels.dequant import dequantise
from offspec_kernels.dequant.int8rows import Int8Rows
from offspec_kernels.dequant.int8rows.layout import STEP
from tests.kernels.dequant.scaled_cases import PATHS, check, has_library_or_skip, library, scales


def make(shape: tuple[int, int], seed: int = 0, odd: float = 0.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    return {"codes": codes, "scale": scales(seed, torch.float32, shape[0], odd=odd)}


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(0, 5),
    columns=st.sampled_from([1, 3, 64, 130, 1025]),
    seed=st.integers(0, 9),
    odd=st.sampled_from([0.0, 0.5]),
)
def test_as_bitsandbytes(path: Backend, rows: int, columns: int, seed: int, odd: float) -> None:
    shape = (rows, columns)
    parts = make(shape, seed, odd)
    if has_library_or_skip("bitsandbytes", path):
        bnb = library("bitsandbytes.functional")
        wanted = bnb.int8_vectorwise_dequant(parts["codes"], parts["scale"])
    else:
        wanted = Int8Rows().reference(parts, shape)
    check(Int8Rows(), parts, shape, wanted, path)


def test_a_weight_that_bitsandbytes_rounded() -> None:
    weight = torch.randn(6, 96, generator=torch.Generator().manual_seed(0))
    codes, scale, _ = library("bitsandbytes.functional").int8_vectorwise_quant(weight.half())
    values = Int8Rows().reference({"codes": codes, "scale": scale}, (6, 96))
    assert (values - weight).abs().max() <= scale.max() / 127 * 0.51


def test_the_step_is_a_float32() -> None:
    assert float(np.float32(STEP)) == STEP == float(np.float32(1 / 127))


def test_its_rows_are_its_parts_rows() -> None:
    format = Int8Rows()
    assert format.by_rows and not format.transposed
    parts = make((9, 32))
    some = {name: part[2:5] for name, part in parts.items()}
    assert torch.equal(format.reference(some, (3, 32)), format.reference(parts, (9, 32))[2:5])


@pytest.mark.gpu
def test_a_gpu_makes_the_same() -> None:
    parts = make((5, 1025))
    there = {name: part.cuda() for name, part in parts.items()}
    found = dequantise(Int8Rows(), there, (5, 1025), torch.zeros(5 * 1025, device="cuda"))
    assert torch.equal(found.cpu(), Int8Rows().reference(parts, (5, 1025)))
