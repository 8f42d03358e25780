"""LLM.int8(), bit for bit as bitsandbytes makes values of it, on every path."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offspec_kernels.backend import Backend
from offspec_kernels.dequant.int8rows import Int8Rows
from tests.kernels.dequant.cases import PATHS, check, has_library_or_skip, library, random_bytes, scales


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=10, deadline=None)
@given(
    rows=st.integers(0, 5),
    columns=st.sampled_from([1, 3, 130, 1025]),
    seed=st.integers(0, 9),
    odd=st.sampled_from([0.0, 0.5]),
)
def test_as_bitsandbytes(path: Backend, rows: int, columns: int, seed: int, odd: float) -> None:
    shape = (rows, columns)
    codes = random_bytes(seed, *shape).view(torch.int8)
    parts = {"codes": codes, "scale": scales(seed, torch.float32, rows, odd=odd)}
    if has_library_or_skip("bitsandbytes", path):
        wanted = library("bitsandbytes.functional").int8_vectorwise_dequant(codes, parts["scale"])
    else:
        wanted = Int8Rows().reference(parts, shape)
    check(Int8Rows(), parts, shape, wanted, path)
