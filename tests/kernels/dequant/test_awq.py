"""AWQ, value for value as its published layout says, on every path."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offspec_kernels.backend import Backend
from offspec_kernels.dequant.awq import Awq
from tests.kernels.dequant.cases import DTYPES, PATHS, check, scales, words
from tests.support.pairwise import all_pairs

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


@pytest.mark.parametrize(
    ("group", "dtype", "path"), all_pairs([(16, 0.0), (64, 0.0), (4, 0.5)], DTYPES, PATHS)
)
def test_as_published(group: tuple[int, float], dtype: torch.dtype, path: Backend) -> None:
    """In the dtype of the scales, of which some are odd."""
    format, shape = Awq(group[0], dtype), (264, 64)
    parts = make(format, shape, odd=group[1])
    codes, zeros = torch.tensor(unpacked(parts["qweight"])), torch.tensor(unpacked(parts["qzeros"]))
    index = torch.arange(64) // format.group
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
