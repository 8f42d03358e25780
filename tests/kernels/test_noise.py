"""Noise made in a compiled loop or inside a kernel has the bits of noise made by torch."""

import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from offspec_kernels.noise import LOW, gumbel, torch_row, uniform_bits
from offspec_kernels.noise.native import native_row
from offspec_kernels.noise.triton import fill_rows, gumbel_noise, gumbel_of, gumbel_run, philox_words
from tests.support.kernel_device import kernel_device

CPU = torch.device("cpu")
BLOCK = 64
quick = settings(max_examples=20, deadline=None)
seeds = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 2**32, 2**32 - 1, 2**64 - 1]))
# Triton's interpreter takes a number from 2^31 to 2^32 for one of 32 bits; no text has so many tokens.
positions = st.one_of(st.integers(0, 2**31 - 1), st.integers(2**32, 2**40))


@quick
@given(seeds, positions, st.one_of(st.integers(1, 40_000), st.sampled_from([1, 2, 3, 4, 5, 16_384, 16_385])))
def test_rows_of_a_loop_are_those_of_torch(seed: int, position: int, size: int) -> None:
    row = native_row(seed, position, size)
    assert row.dtype == torch.float32 and torch.equal(row, torch_row(seed, position, size, CPU))


def test_extreme_values_of_a_loop() -> None:
    """Rows that hold some of the largest and the smallest noise there is, found among many."""
    rows = torch.stack([native_row(seed, 0, 100_000) for seed in range(40)])
    assert rows.max() > 14 and rows.min() < -2.7
    assert torch.equal(rows, torch.stack([torch_row(seed, 0, 100_000, CPU) for seed in range(40)]))
    assert gumbel(torch.tensor([0, LOW])).tolist() == pytest.approx([22.87, -3.13], abs=0.01)


@pytest.mark.exhaustive
def test_what_is_compiled_is_used_where_numba_is_loaded_anyway() -> None:
    said = """
import sys, torch
from offspec_kernels.noise import gumbel_row
row = gumbel_row(3, 4, 1000, torch.device("cpu"))
assert "numba" not in sys.modules
import numba
assert torch.equal(row, gumbel_row(3, 4, 1000, torch.device("cpu")))
print("offspec_kernels.noise.native" in sys.modules)
"""
    found = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    assert found.stdout == "True\n"


@triton.jit(do_not_specialize=["position", "key_low", "key_high"])
def _values(bits, single, run, first, position, key_low, key_high, BLOCK: tl.constexpr):
    # As launchers have it: from 2^31 on, a plain one would be unsigned.
    position = tl.cast(position, tl.int64)
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


@pytest.mark.kernels
@quick
@given(seeds, positions, st.integers(0, 60_000))
def test_bits_and_values_of_a_kernel_are_those_of_torch(seed: int, position: int, first: int) -> None:
    device = kernel_device()
    expected = uniform_bits(seed, position, torch.arange(first, first + BLOCK // 4))
    bits = torch.full((BLOCK,), -1, device=device)
    single, run = torch.full((2, BLOCK), torch.nan, device=device)
    keys = seed & LOW, seed >> 32
    _values[(1,)](bits, single, run, first, position, *keys, BLOCK=BLOCK, enable_fp_fusion=False)
    assert torch.equal(bits.cpu(), expected)
    assert torch.equal(single.cpu(), gumbel(expected))
    assert torch.equal(run.cpu(), gumbel(expected))


@pytest.mark.kernels
def test_extreme_bits_have_the_values_of_torch() -> None:
    ends = torch.arange(BLOCK)
    for bits in (ends, LOW - ends, ends * 67_108_859, 2_714_937_127 - 32 + ends):  # the last: around g = 0
        values = torch.full((BLOCK,), torch.nan, device=kernel_device())
        _of_bits[(1,)](bits.to(kernel_device()), values, BLOCK=BLOCK, enable_fp_fusion=False)
        assert torch.equal(values.cpu(), gumbel(bits))


@pytest.mark.kernels
def test_rows_of_a_table_have_the_noise_of_their_positions() -> None:
    """Rows that hold noise already, and others that must stay."""
    table = torch.full((8, 1027), torch.nan, device=kernel_device())
    fill_rows(table, 2**64 - 1, 2**40 + 5, 5)  # 5, 6, 7, 0, 1
    for place in range(5):
        row = table[(5 + place) % 8].cpu()
        assert torch.equal(row, torch_row(2**64 - 1, 2**40 + 5 + place, 1027, CPU))
    assert table[2:5].isnan().all()
