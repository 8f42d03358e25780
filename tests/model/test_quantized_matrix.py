"""Quantization to few bits: layout, exact cases, and the effect of calibration."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offspec.model.quantize.calibration import InputMoments
from offspec.model.quantize.quantized_matrix import (
    QuantizedMatrix,
    dequantize_matrix,
    is_quantizable,
    quantize_matrix,
    quantized_bytes,
)
from offspec_kernels.dequant.grouped import BITS, GROUP, Grouped, unpack_codes

_WIDTHS = pytest.mark.parametrize("bits", BITS)


def _random(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def quantized(weight: torch.Tensor, bits: int, importance: torch.Tensor | None = None) -> torch.Tensor:
    return dequantize_matrix(quantize_matrix(weight, bits, importance))


def _nearest(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Quantize with uniform steps between each group's extremes, without fitting."""
    groups = weight.float().view(-1, GROUP)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    last = (1 << bits) - 1
    step = ((high - low) / last).half().float()
    low = low.half().float()
    codes = ((groups - low) / step).round().clamp(0, last)
    return (codes * step + low).view(weight.shape)


def _by_hand(packed: QuantizedMatrix) -> torch.Tensor:
    """Dequantize group by group from codes, steps and offsets."""
    groups = unpack_codes(packed.parts["codes"].view(-1, 8 * packed.bits), packed.bits).tolist()
    steps, offsets = (packed.parts[name].view(-1).float().tolist() for name in ("step", "offset"))
    values = [
        torch.tensor(codes, dtype=torch.float32) * step + offset
        for codes, step, offset in zip(groups, steps, offsets, strict=True)
    ]
    return torch.cat(values).view(packed.shape).to(packed.dtype)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.integers(1, 3), min_size=0, max_size=2),
    st.sampled_from([(4, 64), (2, 192), (3, 128), (16, 12), (64, 3), (2, 96)]),
    st.sampled_from(BITS),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 1000),
)
def test_unpacking_equals_the_reference_for_any_shape(
    outer: list[int], matrix: tuple[int, int], bits: int, dtype: torch.dtype, seed: int
) -> None:
    """Rows of whole groups and groups that span rows, in stacks of any depth."""
    weight = _random((*outer, *matrix), seed, dtype)
    packed = quantize_matrix(weight, bits)
    values = dequantize_matrix(packed)
    assert (values.shape, values.dtype) == (weight.shape, weight.dtype)
    assert torch.equal(values, _by_hand(packed))
    assert packed.nbytes == quantized_bytes(weight.shape, bits)


@settings(deadline=None, max_examples=20)
@given(st.sampled_from(BITS), st.integers(0, 1000), st.booleans())
def test_quantizing_slabs_equals_quantizing_rows(bits: int, seed: int, weighted: bool) -> None:
    weight, matter = _random((5, 3, 128), seed), _random((1, 128), seed + 1).exp()
    importance = matter if weighted else None
    whole = quantized(weight, bits, importance)
    for outer in range(5):
        assert torch.equal(whole[outer], quantized(weight[outer], bits, importance))


@_WIDTHS
def test_parts_match_the_format_and_unpacking_allocates_only_workspace(bits: int) -> None:
    """Any reader of the format can stream the parts."""
    packed = quantize_matrix(_random((2, 3, 128), 5, torch.bfloat16), bits)
    shapes = {name: (part.dtype, part.shape) for name, part in Grouped(bits).parts((2, 3, 128)).items()}
    assert {name: (part.dtype, tuple(part.shape)) for name, part in packed.parts.items()} == shapes
    memory = torch.full((6 * 128 + 9,), torch.nan, dtype=torch.bfloat16)
    values = dequantize_matrix(packed, memory[4 : 4 + 6 * 128])
    assert values.data_ptr() == memory[4:].data_ptr() and torch.equal(values, dequantize_matrix(packed))
    assert memory[:4].isnan().all() and memory[4 + 6 * 128 :].isnan().all()


@pytest.mark.parametrize(("bits", "each"), [(2, 2.5), (3, 3.5), (4, 4.5), (8, 8.5)])
def test_a_weight_takes_half_a_bit_more_than_its_code(bits: int, each: float) -> None:
    assert quantized_bytes((64, 1000), bits) * 8 == quantized_bytes((1000, 64), bits) * 8 == 64 * 1000 * each


def test_which_weights_are_quantizable() -> None:
    assert all(
        is_quantizable("q.weight", shape) for shape in [(64, 64), (3, 64), (32, 32), (2, 16, 4), (0, 64)]
    )
    assert not any(is_quantizable("q.weight", shape) for shape in [(), (64,), (4096,), (3, 5), (63, 65)])
    assert not is_quantizable("conv1d.weight", (64, 1, 4)) and not is_quantizable(
        "mixer.dt_proj.weight", (64, 64)
    )


@_WIDTHS
def test_uniform_steps_and_constant_groups_are_exact(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (50, GROUP), generator=torch.Generator().manual_seed(0)).float()
    codes[:, 0], codes[:, 1] = 0, 2**bits - 1
    for offset in (0.0, 3.0, -100.0):
        weight = codes * 0.25 + offset
        assert torch.allclose(quantized(weight, bits), weight, atol=1e-4)
    for value in (0.0, 1.0, -2.5, 1e-6, 6e4):
        weight = torch.full((3, GROUP), value)
        assert torch.allclose(quantized(weight, bits), weight, rtol=1e-3, atol=1e-5)


@_WIDTHS
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000), tail=st.floats(1.0, 3.0))
def test_the_error_is_smaller_than_that_of_plain_rounding(bits: int, seed: int, tail: float) -> None:
    weight = _random((16, 256), seed)
    weight = weight.sign() * weight.abs() ** tail
    error, plain = ((values - weight).norm() for values in (quantized(weight, bits), _nearest(weight, bits)))
    assert error <= plain * 1.001


def test_fewer_bits_have_larger_errors() -> None:
    weight = _random((64, 256), 1)
    errors = [float((quantized(weight, bits) - weight).norm() / weight.norm()) for bits in BITS]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] < 0.38 and errors[1] < 0.19 and errors[2] < 0.09 and errors[3] < 0.006


@pytest.mark.parametrize(("bits", "shape"), [(2, (64, 256)), (3, (8, 24, 32)), (4, (64, 256))])
def test_important_weights_have_smaller_errors(bits: int, shape: tuple[int, ...]) -> None:
    weight = _random(shape, 2)
    importance = torch.ones(shape[-1])
    importance[::8] = 100.0
    plain, weighted = (quantized(weight, bits, by) - weight for by in (None, importance[None]))
    assert weighted[..., ::8].norm() < 0.9 * plain[..., ::8].norm()
    assert (importance * weighted.square()).sum() < (importance * plain.square()).sum()
    nothing_matters = torch.zeros(1, shape[-1])
    assert torch.equal(quantized(weight, bits, nothing_matters), quantized(weight, bits)), (
        "equal importance everywhere"
    )


def test_moments_are_the_squared_inputs() -> None:
    from transformers.pytorch_utils import Conv1D

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(6, 10)
            self.down = Conv1D(6, 10)  # its weight is [in 10, out 6]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.down(self.up(x))
            return y

    block, x = Block(), torch.randn(2, 5, 6)
    moments = InputMoments(block)
    block(x[:1])
    block(x[1:])
    moments.close()
    up = moments.importance("up.weight", block.up.weight)
    down = moments.importance("down.weight", block.down.weight)
    assert up is not None and up.shape == (1, 6)
    assert torch.allclose(up[0], x.square().sum((0, 1)), rtol=1e-4)
    assert down is not None and down.shape == (10, 1)
    assert torch.allclose(down[:, 0], block.up(x).square().sum((0, 1)), rtol=1e-4)
    assert moments.importance("other.weight", block.up.weight) is None
    block(x)
    again = moments.importance("up.weight", block.up.weight)
    assert again is not None and torch.equal(again, up)
