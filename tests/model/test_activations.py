"""Activations have the same bits at any place of a tensor of any size, with any number of threads."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

from offspec.model.row_independence import make_activations_row_independent, row_independent
from tests.support.pairwise import all_pairs

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda values: F.gelu(values, approximate="tanh"),
    "sigmoid": torch.sigmoid,
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("name", "dtype", "threads"), all_pairs(sorted(FUNCTIONS), DTYPES, [1, 3]), indirect=["threads"]
)
def test_bits_at_any_place(name: str, dtype: torch.dtype, threads: int) -> None:
    function = FUNCTIONS[name]
    numbers = (4 * torch.randn(192, generator=torch.Generator().manual_seed(0))).to(dtype)
    expected = function(numbers)  # whole vectors, one thread
    for width in (1, 24, 1000):
        for rows in (1, 3, 33, 515):
            values = numbers.repeat(-(-rows * width // 192) + 1)[: rows * width].view(rows, width)
            wanted = expected.repeat(-(-rows * width // 192) + 1)[: rows * width].view(rows, width)
            assert torch.equal(row_independent(function, values), wanted), (rows, width)
            strided = torch.cat([values, values], 1)[:, :width]  # rows with gaps between them
            assert torch.equal(row_independent(function, strided), wanted), (rows, width)


def test_activations_are_made_row_independent() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(24, 24), torch.nn.SiLU())
    values = torch.randn(7, 24)
    make_activations_row_independent(layer)
    with torch.no_grad():
        assert torch.equal(layer(values), row_independent(F.silu, layer[0](values)))
