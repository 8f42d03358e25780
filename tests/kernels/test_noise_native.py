"""Noise made in a compiled loop has the bits of noise made by torch."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offspec_kernels.noise import LOW, gumbel, gumbel_row, torch_row
from offspec_kernels.noise.native import native_row

CPU = torch.device("cpu")
quick = settings(max_examples=25, deadline=None)
seeds = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 2**32, LOW, 2**64 - 1]))
positions = st.one_of(st.integers(0, 100_000), st.integers(0, 2**40))


@quick
@given(seeds, positions, st.integers(1, 40_000))
def test_rows_are_those_of_torch(seed: int, position: int, size: int) -> None:
    assert torch.equal(native_row(seed, position, size), torch_row(seed, position, size, CPU))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16_383, 16_384, 16_385, 151_936])
def test_rows_of_any_length(size: int) -> None:
    row = native_row(2**64 - 1, 2**33 + 1, size)
    assert row.shape == (size,) and row.dtype == torch.float32
    assert torch.equal(row, torch_row(2**64 - 1, 2**33 + 1, size, CPU))


def test_extreme_values() -> None:
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
    assert torch.equal(gumbel_row(3, 4, 1000, CPU), torch_row(3, 4, 1000, CPU))
