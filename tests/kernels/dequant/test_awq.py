"""AWQ, value for value as its published layout says, on every path."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offspec_kernels.backend import Backend
from offspec_kernels.dequant.awq import Awq
from tests.kernels.dequant.cases import DTYPES, PATHS, check, scales, words

ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the outputs in a word, from its lowest bits


def make(format: Awq, shape: tuple[int, int], seed: int = 0, odd: float = 0.0) -> dict[str, Tensor]:
    parts = format.parts(shape)
    return {
        "qweight": words(seed, *parts["qweight"].shape),
        "qzeros": words(seed + 1, *parts["qzeros"].shape),
        "scales": scales(seed + 2, format.scales, *parts["scales"].shape, odd=odd),
    }


def unpacked(packed: Tensor) -> list[list[int]]:
    rows = []
    for row in packed.tolist():
        codes = [0] * (8 * len(row))
        for place, word in enumerate(row):
            for nibble, output in enumerate(ORDER):
                codes[8 * place + output] = word >> (4 * nibble) & 15
        rows.append(codes)
    return rows


def one_by_one(format: Awq, parts: dict[str, Tensor], shape: tuple[int, int]) -> Tensor:
    """In float16, of one weight after the other."""
    codes, zeros, scale = unpacked(parts["qweight"]), unpacked(parts["qzeros"]), parts["scales"].numpy()
    values = np.empty(shape, np.float16)
    for out in range(shape[0]):
        for i in range(shape[1]):
            group = i // format.group
            values[out, i] = np.float16(codes[i][out] - zeros[group][out]) * scale[group, out]
    return torch.from_numpy(values).float()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("group", [16, 64])
def test_as_published(group: int, path: Backend) -> None:
    format, shape = Awq(group), (40, 64)
    parts = make(format, shape)
    check(format, parts, shape, one_by_one(format, parts, shape), path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_scales(dtype: torch.dtype, path: Backend) -> None:
    format, shape = Awq(4, dtype), (264, 16)
    parts = make(format, shape, odd=0.5)
    codes, zeros = torch.tensor(unpacked(parts["qweight"])), torch.tensor(unpacked(parts["qzeros"]))
    index = torch.arange(16) // 4
    wanted = (codes - zeros[index]).to(dtype) * parts["scales"][index]
    check(format, parts, shape, wanted.float().mT.contiguous(), path)


@settings(max_examples=8, deadline=None)
@given(
    rows=st.sampled_from([8, 1600, 4096, 4104]),
    group=st.integers(1, 9),
    groups=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_blocks_cut_off(rows: int, group: int, groups: int, seed: int) -> None:
    format, shape = Awq(group), (rows, group * groups)
    parts = make(format, shape, seed)
    check(format, parts, shape, format.reference(parts, shape), "eager")
