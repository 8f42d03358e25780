"""Rounding to 4 bits: layout, exactness where it can be exact, and what calibration is for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offspec.model.calibration import InputMoments
from offspec.model.packing import GROUP, Packed, pack, packed_bytes, unpack


def _slow_unpack(packed: Packed) -> torch.Tensor:
    """One weight at a time."""
    values = []
    for index in range(packed.shape.numel()):
        byte = int(packed.codes[index // 2])
        code = byte >> 4 if index % 2 == 0 else byte & 15
        group = index // GROUP
        values.append(code * packed.step[group].float() + packed.offset[group].float())
    return torch.stack(values).view(packed.shape).to(packed.dtype)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=2, max_size=3).map(tuple),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 1000),
)
def test_unpacking_equals_the_slow_way_for_any_shape(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    packed = pack(weight)
    assert torch.equal(unpack(packed), _slow_unpack(packed))
    assert packed.nbytes == packed_bytes(weight.numel())


def test_a_weight_takes_four_and_a_half_bits() -> None:
    assert packed_bytes(64 * 1000) * 8 == 64 * 1000 * 4.5


@pytest.mark.parametrize("offset", [0.0, 3.0, -100.0])
def test_even_steps_survive_exactly(offset: float) -> None:
    codes = torch.randint(0, 16, (50, GROUP), generator=torch.Generator().manual_seed(0)).float()
    codes[:, 0], codes[:, 1] = 0, 15
    weight = codes * 0.25 + offset
    assert torch.allclose(unpack(pack(weight)), weight, atol=1e-4)


def test_the_error_is_within_a_step_and_small_on_average() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    error = (unpack(pack(weight)) - weight).norm() / weight.norm()
    assert error < 0.09  # plain rounding between the extremes leaves about 0.1


def test_weights_that_matter_are_kept_closer() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(2))
    importance = torch.ones(256)
    importance[::8] = 100.0
    plain, weighted = unpack(pack(weight)) - weight, unpack(pack(weight, importance[None])) - weight
    assert weighted[:, ::8].norm() < 0.8 * plain[:, ::8].norm()
    assert (importance * weighted.square()).sum() < (importance * plain.square()).sum()


@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, 1e-6, 6e4])
def test_constant_groups(value: float) -> None:
    weight = torch.full((3, GROUP), value)
    assert torch.allclose(unpack(pack(weight)), weight, rtol=1e-3, atol=1e-5)


def test_importance_that_is_all_zero_counts_all_alike() -> None:
    weight = torch.randn(4, GROUP, generator=torch.Generator().manual_seed(3))
    assert torch.equal(unpack(pack(weight, torch.zeros(1, GROUP))), unpack(pack(weight)))


def test_moments_are_the_squares_of_what_came_in() -> None:
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
