"""GPTQ, value for value as its published layout says, on every path."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offspec_kernels.backend import Backend
from offspec_kernels.dequant import dequantize
from offspec_kernels.dequant.gptq import Gptq
from offspec_kernels.errors import ArgumentError
from tests.kernels.dequant.cases import DTYPES, PATHS, check, scales, unpacked, words
from tests.support.pairwise import all_pairs


def make(format: Gptq, shape: tuple[int, int], seed: int = 0, odd: float = 0.0) -> dict[str, Tensor]:
    parts = format.parts(shape)
    made = {
        "qweight": words(seed, *parts["qweight"].shape),
        "qzeros": words(seed + 1, *parts["qzeros"].shape),
        "scales": scales(seed + 2, format.scales, *parts["scales"].shape, odd=odd),
    }
    if format.act_order:
        generator = torch.Generator().manual_seed(seed)
        made["g_idx"] = torch.randint(len(made["scales"]), (shape[1],), generator=generator).int()
    return made


def field(column: list[int], place: int, bits: int) -> int:
    """The code at a place of words that fill up from their lowest bits."""
    stream = sum((word & 0xFFFFFFFF) << (32 * index) for index, word in enumerate(column))
    return stream >> (place * bits) & ((1 << bits) - 1)


def by_formula(format: Gptq, parts: dict[str, Tensor], shape: tuple[int, int]) -> Tensor:
    """In the dtype of the scales."""
    bits, group = format.bits, shape[1] if format.group == -1 else format.group
    index = parts["g_idx"].long() if format.act_order else torch.arange(shape[1]) // group
    ones = sum(1 << bit for bit in range(0, 32, bits))
    zeros = []
    for row in parts["qzeros"].tolist():
        if format.zero_plus_one and bits != 3:  # to a word's zeros at once, carries and all
            row = [(word & 0xFFFFFFFF) + ones & 0xFFFFFFFF for word in row]
        plus = int(format.zero_plus_one and bits == 3)
        zeros.append([(field(row, place, bits) + plus) % 2**bits for place in range(shape[0])])
    columns = parts["qweight"].T.tolist()
    codes = torch.tensor([[field(column, i, bits) for i in range(shape[1])] for column in columns])
    steps = (codes.T - torch.tensor(zeros)[index]).to(format.scales)
    return (parts["scales"][index] * steps).float().T.contiguous()


@pytest.mark.parametrize(
    ("bits", "path", "dtype", "plus", "act_order"),
    all_pairs([2, 3, 4, 8], PATHS, DTYPES, [False, True], [False, True]),
)
def test_as_published(bits: int, path: Backend, dtype: torch.dtype, plus: bool, act_order: bool) -> None:
    format, shape = Gptq(bits, 32, act_order, plus, scales=dtype), (32, 64)
    parts = make(format, shape, odd=0.2)
    check(format, parts, shape, by_formula(format, parts, shape), path)


def test_a_zero_that_wraps_carries_as_it_borrowed() -> None:
    """A word 0, 1, 2, .. of true zeros, less 1 each: what the first version stores."""
    true = sum(code << 4 * code for code in range(8))
    stored = (true - 0x11111111) % 2**32
    parts = {
        "qweight": torch.zeros(1, 8, dtype=torch.int32),
        "qzeros": torch.tensor([[stored - 2**32 if stored >= 2**31 else stored]], dtype=torch.int32),
        "scales": torch.ones(1, 8, dtype=torch.float16),
    }
    values = dequantize(Gptq(4, -1, False), parts, (8, 8), torch.empty(64))
    assert values[:, 0].tolist() == [0, -1, -2, -3, -4, -5, -6, -7]


@settings(max_examples=10, deadline=None)
@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    rows=st.sampled_from([64, 640, 4096, 4160]),
    groups=st.integers(1, 3),
    whole=st.booleans(),
    act_order=st.booleans(),
    seed=st.integers(0, 99),
)
def test_blocks_cut_off(bits: int, rows: int, groups: int, whole: bool, act_order: bool, seed: int) -> None:
    """More columns than a loop takes at once, and rows that are no multiple of what a thread takes."""
    least = 32 if bits == 3 else 32 // bits
    group, shape = 3 * least, (rows, groups * 3 * least)
    format = Gptq(bits, -1 if whole else group, act_order)
    parts = make(format, shape, seed)
    check(format, parts, shape, format.reference(parts, shape), "eager")


@pytest.mark.parametrize("path", ["reference", "eager"])
@pytest.mark.parametrize("index", [-1, 2])
def test_no_such_group(index: int, path: Backend) -> None:
    format, shape = Gptq(4, 32, True), (8, 64)
    parts = make(format, shape)
    parts["g_idx"][5] = index
    with pytest.raises(ArgumentError, match="g_idx: groups must be from 0 to 1") as caught:
        dequantize(format, parts, shape, torch.empty(8 * 64), path=path)
    assert caught.value.argument == "g_idx"


@pytest.mark.kernels
def test_no_such_group_is_read_by_a_kernel() -> None:
    """A kernel cannot raise. It makes what is no number, which is noticed when a weight is first read."""
    format, shape = Gptq(4, 32, True), (8, 64)
    parts = make(format, shape)
    parts["g_idx"][5] = 2**31 - 1
    values = unpacked(format, parts, shape, torch.float32, "triton")
    assert bool(values[:, 5].isnan().all()) and bool(values[:, 6].isfinite().all())
