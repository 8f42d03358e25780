"""The short convolution along trees: right on every path, and with the bits of a row by itself."""

import math
import random

import pytest
import torch
from torch import Tensor

from offspec_kernels.backend import Backend
from offspec_kernels.tree_conv import tree_conv
from tests.support.kernel_device import device_of, moved
from tests.support.pairwise import all_pairs
from tests.support.poison import poisoned

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PATHS: list[Backend] = ["eager", "triton"]


def _drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _window(rows: int, taps: int) -> Tensor:
    """Of a random tree behind taps - 1 inputs."""
    rng, window = random.Random(0), list[list[int]]()
    for row in range(rows):
        parent = rng.randrange(max(-1, row - 6), row)
        before = window[parent][1:] if parent >= 0 else list(range(taps - 1))
        window.append([*before, row + taps - 1])
    return torch.tensor(window, dtype=torch.int64).view(rows, taps)


def _conv(path: Backend, inputs: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    device = device_of(path)
    given = (None if of is None else moved(of, device) for of in (inputs, window, weight, bias))
    with poisoned():
        return tree_conv(*given, path=path).cpu()


@pytest.mark.parametrize(
    ("shape", "dtype", "path"), all_pairs([(1, 1, 1), (9, 300, 4), (5, 70, 3), (0, 6, 4)], DTYPES, PATHS)
)
def test_every_path_is_near_the_reference(
    shape: tuple[int, int, int], dtype: torch.dtype, path: Backend
) -> None:
    rows, channels, taps = shape
    window, inputs = _window(rows, taps), _drawn(rows + taps - 1, channels, dtype=dtype)
    weight, bias = _drawn(channels, taps, dtype=dtype, seed=1), _drawn(channels, dtype=dtype, seed=2)
    wide = torch.full((rows + taps + 1, channels + 3), math.nan, dtype=dtype)
    wide[: len(inputs), :channels] = inputs
    for laid in (weight, weight.T.contiguous().T):
        for shift in (None, bias):
            expected = tree_conv(inputs, window, weight, shift, path="reference")
            assert expected.dtype == torch.float32
            got = _conv(path, wide[:, :channels], window, laid, shift)
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
            mixed = _conv(path, inputs, window, laid.float(), shift)
            assert torch.equal(mixed, got)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bits_of_a_row(path: Backend, dtype: torch.dtype) -> None:
    """Alone with the inputs that it takes, and beside inputs that are no numbers."""
    rows, channels, taps = 12, 130, 4
    window, inputs = _window(rows, taps), _drawn(rows + taps - 1, channels, dtype=dtype)
    weight, bias = _drawn(channels, taps, dtype=dtype, seed=1), _drawn(channels, dtype=dtype, seed=2)
    whole = _conv(path, inputs, window, weight, bias)
    for row in range(0, rows, 3):
        taken = inputs[window[row]]
        assert torch.equal(_conv(path, taken, torch.arange(taps)[None], weight, bias)[0], whole[row])
        beside = torch.full_like(inputs, math.nan)
        beside[window[row]] = taken
        assert torch.equal(_conv(path, beside, window, weight, bias)[row], whole[row])
