"""Rounding to NF4 and FP4: each code is the nearest one, for the size that is stored."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offspec_kernels.dequant.codebook import Codebook, quantize, tables
from offspec_kernels.dequant.codebook.tables import BLOCKS, table_of
from offspec_kernels.errors import ArgumentError
from tests.kernels.dequant.cases import library

KINDS = ["nf4", "fp4"]
CPU = torch.device("cpu")


def drawn(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def values_of(parts: dict[str, Tensor], kind: str, block: int, shape: tuple[int, ...]) -> Tensor:
    format = Codebook(kind, block, torch.float16)
    wanted = format.parts(shape)
    assert {name: (part.dtype, part.shape) for name, part in parts.items()} == {
        name: (wanted[name].dtype, wanted[name].shape) for name in ("codes", "absmax")
    }
    return format.reference(parts, shape)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(
    block=st.sampled_from(BLOCKS),
    blocks=st.integers(0, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    size=st.sampled_from([1e-6, 0.02, 1.0, 3000.0]),
    seed=st.integers(0, 99),
)
def test_codes_are_the_nearest(
    kind: str, block: int, blocks: int, dtype: torch.dtype, size: float, seed: int
) -> None:
    weight = (drawn((blocks, block), seed) * size).to(dtype)
    parts = quantize(weight, kind, block)
    exact = weight.double()
    assert torch.equal(parts["absmax"], exact.abs().amax(1).half())
    found = values_of(parts, kind, block, (blocks, block)).double()
    choices = table_of(kind, CPU).double() * parts["absmax"].double()[:, None, None]  # [blocks, 1, 16]
    least = (choices - exact[:, :, None]).abs().amin(2)
    # Half-way between two values, float32 may not tell which is nearer.
    assert ((found - exact).abs() <= least + 1e-6 * exact.abs().amax(1, keepdim=True)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_what_was_rounded_changes_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do pieces of a weight, nor gaps in it."""
    weight = drawn((640, 28)).mT
    parts = quantize(weight.contiguous(), kind, 128)
    monkeypatch.setattr(tables, "_AT_ONCE", 256)
    for same in (values_of(parts, kind, 128, (28, 640)), weight):
        again = quantize(same, kind, 128)
        assert all(torch.equal(again[name], parts[name]) for name in parts)


@pytest.mark.parametrize("kind", KINDS)
def test_no_worse_than_bitsandbytes(kind: str) -> None:
    bnb = library("bitsandbytes.functional")
    weight = drawn((64, 1024))
    ours = values_of(quantize(weight, kind, 64), kind, 64, weight.shape)
    theirs = bnb.dequantize_4bit(*bnb.quantize_4bit(weight, blocksize=64, quant_type=kind))
    assert (ours - weight).square().mean() <= (theirs - weight).square().mean() * 1.001


@pytest.mark.parametrize("kind", KINDS)
def test_nought_is_nought(kind: str) -> None:
    """And so are blocks that are too small for float16."""
    weight = torch.zeros(3, 64)
    weight[1, 3], weight[2] = 1.0, 1e-9
    values = values_of(quantize(weight, kind, 64), kind, 64, (3, 64))
    assert torch.equal(values[:2], weight[:2]) and not values[:2].signbit().any()
    assert not values[2].any()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 65520.0])
def test_values_without_a_size_are_refused(value: float) -> None:
    weight = drawn((4, 64))
    weight[2, 5] = value
    with pytest.raises(
        ArgumentError, match=r"^weight: all values must be finite and below 65,520 in magnitude$"
    ):
        quantize(weight, "nf4", 64)


def test_what_cannot_be_is_refused() -> None:
    weight = drawn((4, 72))
    for argument, arguments in (
        ("kind", (weight, "int4", 64)),
        ("block", (weight, "nf4", 72)),
        ("weight", (weight, "nf4", 64)),
        ("weight", (weight.double(), "nf4", 32)),
    ):
        with pytest.raises(ArgumentError) as caught:
            quantize(*arguments)
        assert caught.value.argument == argument
