"""Noise made inside a kernel has the bits of noise made by torch."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offspec_kernels.noise import LOW, gumbel, torch_row, uniform_bits
from offspec_kernels.noise.triton import fill_rows, gumbel_noise, gumbel_of, gumbel_run, philox_words
from tests.support.kernel_device import kernel_device

BLOCK = 64
quick = settings(max_examples=25, deadline=None)
seeds = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 2**32, 2**32 - 1, 2**64 - 1]))
# Triton's interpreter takes a number from 2^31 to 2^32 for one of 32 bits; no text has so many tokens.
positions = st.one_of(st.integers(0, 2**31 - 1), st.integers(2**32, 2**40))


@triton.jit(do_not_specialize=["position", "key_low", "key_high"])
def _values(bits, single, run, first, position, key_low, key_high, BLOCK: tl.constexpr):
    position = tl.cast(
        position, tl.int64
    )  # as launchers have it: from 2^31 on, a plain one would be unsigned
    blocks = first + tl.arange(0, BLOCK // 4)
    tokens = first * 4 + tl.arange(0, BLOCK)
    place = tl.arange(0, BLOCK)
    w0, w1, w2, w3 = philox_words(blocks, position, key_low, key_high)
    tl.store(bits + tl.arange(0, BLOCK // 4) * 4, w0.to(tl.int64))
    tl.store(bits + tl.arange(0, BLOCK // 4) * 4 + 1, w1.to(tl.int64))
    tl.store(bits + tl.arange(0, BLOCK // 4) * 4 + 2, w2.to(tl.int64))
    tl.store(bits + tl.arange(0, BLOCK // 4) * 4 + 3, w3.to(tl.int64))
    tl.store(single + place, gumbel_noise(tokens, position, key_low, key_high))
    tl.store(run + place, gumbel_run(blocks, position, key_low, key_high))


@triton.jit
def _of_bits(bits, values, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(values + place, gumbel_of(tl.load(bits + place).to(tl.uint32)))


def made(seed: int, position: int, first: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    bits = torch.full((BLOCK,), -1, device=device)
    single, run = torch.full((2, BLOCK), torch.nan, device=device)
    _values[(1,)](
        bits, single, run, first, position, seed & LOW, seed >> 32, BLOCK=BLOCK, enable_fp_fusion=False
    )
    return bits, single, run


def check(seed: int, position: int, first: int, device: str) -> None:
    expected = uniform_bits(seed, position, torch.arange(first, first + BLOCK // 4))
    bits, single, run = made(seed, position, first, device)
    assert torch.equal(bits.cpu(), expected)
    assert torch.equal(single.cpu(), gumbel(expected))
    assert torch.equal(run.cpu(), gumbel(expected))


@pytest.mark.kernels
@quick
@given(seeds, positions, st.integers(0, 60_000))
def test_bits_and_values_are_those_of_torch(seed: int, position: int, first: int) -> None:
    check(seed, position, first, kernel_device())


def check_extremes(device: str) -> None:
    ends = torch.arange(BLOCK)
    for bits in (ends, LOW - ends, ends * 67_108_859, 2_714_937_127 - 32 + ends):  # the last: around g = 0
        values = torch.full((BLOCK,), torch.nan, device=device)
        _of_bits[(1,)](bits.to(device), values, BLOCK=BLOCK, enable_fp_fusion=False)
        assert torch.equal(values.cpu(), gumbel(bits))


@pytest.mark.kernels
def test_extreme_bits_have_the_values_of_torch() -> None:
    check_extremes(kernel_device())


def check_rows(device: str) -> None:
    """Rows of a table that hold noise already, and others that must stay."""
    table = torch.full((8, 1027), torch.nan, device=device)
    fill_rows(table, 2**64 - 1, 2**40 + 5, 5)  # 5, 6, 7, 0, 1
    for place in range(5):
        row = table[(5 + place) % 8].cpu()
        assert torch.equal(row, torch_row(2**64 - 1, 2**40 + 5 + place, 1027, torch.device("cpu")))
    assert table[2:5].isnan().all()


@pytest.mark.kernels
def test_rows_of_a_table_have_the_noise_of_their_positions() -> None:
    check_rows(kernel_device())


@pytest.mark.gpu
def test_a_gpu_makes_the_same_noise() -> None:
    check_rows("cuda")
    for seed, position, first in ((1, 0, 0), (2**64 - 1, 2**40 + 1, 32_000), (7, 1, 3)):
        check(seed, position, first, "cuda")
    check_extremes("cuda")
