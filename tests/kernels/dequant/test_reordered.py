"""Rows and columns in another order, of one tensor or several: a plain gather of values, on every path."""

from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from offspec_kernels.backend import Backend
from offspec_kernels.dequant.ggml.reordered import Reordered
from offspec_kernels.errors import ArgumentError
from tests.kernels.dequant.scaled_cases import unpacked

PATHS: list[Backend] = ["reference", "eager", "triton"]
COLUMNS = 96


def stored(kind: str, rows: int) -> tuple[Tensor, Tensor]:
    """A tensor of a GGUF file as bytes [rows, bytes], and its values."""
    number = gguf.GGMLQuantizationType[kind]
    data = np.random.default_rng(rows).standard_normal((rows, COLUMNS)).astype(np.float32)
    blocks = gguf.quantize(data, number).view(np.uint8).reshape(rows, -1)
    values = np.array(gguf.dequantize(blocks, number), np.float32)
    return torch.from_numpy(blocks.copy()), torch.from_numpy(values.reshape(rows, COLUMNS))


def made(format: Reordered, blocks: list[Tensor], rows: int, dtype: torch.dtype, path: Backend) -> Tensor:
    parts = {f"blocks{i}": each for i, each in enumerate(blocks)}
    return unpacked(format, parts, (rows, COLUMNS), dtype, path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F32", "BF16"])
def test_rows_of_one_tensor(kind: str, dtype: torch.dtype, path: Backend) -> None:
    blocks, values = stored(kind, 20)
    format = Reordered((kind,), (20,), ((0, 0, 4), (0, 12, 8), (0, 4, 8)))
    wanted = values[[*range(4), *range(12, 20), *range(4, 12)]]
    assert torch.equal(made(format, [blocks], 20, dtype, path), wanted.to(dtype))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kinds", [("Q8_0", "Q8_0"), ("Q4_0", "F16"), ("F32", "Q5_1")])
def test_rows_of_two_tensors_of_their_own_types(kinds: tuple[str, str], path: Backend) -> None:
    (first, one), (second, two) = stored(kinds[0], 6), stored(kinds[1], 10)
    format = Reordered(kinds, (6, 10), ((1, 0, 5), (0, 0, 3), (1, 5, 5), (0, 3, 3)))
    wanted = torch.cat([two[:5], one[:3], two[5:], one[3:]])
    assert torch.equal(made(format, [first, second], 16, torch.float32, path), wanted)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tiles", [(3, 2, 16), (2, 3, 16), (96, 1, 1), (4, 24, 1)])
def test_columns_that_cross_blocks(
    tiles: tuple[int, int, int], path: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offspec_kernels.dequant.ggml import reordered

    monkeypatch.setattr(reordered, "_ROWS", 3)
    blocks, values = stored("Q8_0", 7)
    first, second, size = tiles
    wanted = values[
        :, [(a * second + b) * size + i for b in range(second) for a in range(first) for i in range(size)]
    ]
    format = Reordered(("Q8_0",), (7,), ((0, 0, 7),), tiles)
    assert torch.equal(made(format, [blocks], 7, torch.float32, path), wanted)


def test_all_orders_of_a_type_are_unpacked_by_the_same_code() -> None:
    """So that it is compiled on the smallest of such weights."""
    rows = Reordered(("Q8_0",), (7,), ((0, 3, 4), (0, 0, 3)))
    assert rows.kin == Reordered(("Q8_0",), (9,), ((0, 0, 9),), (3, 2, 16)).kin
    assert rows.kin != Reordered(("Q4_0",), (7,), ((0, 0, 7),)).kin


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ((("Q8_0",), (7, 8), ((0, 0, 7),)), "one for each of 1 tensors"),
        ((("Q8_0",), (7,), ((0, 0, 8),)), "outside of"),
        ((("Q8_0",), (7,), ((1, 0, 1),)), "outside of"),
        ((("Q8_0",), (7,), ((0, -1, 1),)), "outside of"),
    ],
)
def test_an_order_that_cannot_be(given: Any, why: str) -> None:
    with pytest.raises(ArgumentError, match=why):
        Reordered(*given)


def test_a_shape_that_is_not_that_of_the_order() -> None:
    with pytest.raises(ArgumentError, match="rows of its runs"):
        Reordered(("Q8_0",), (7,), ((0, 0, 7),)).parts((8, COLUMNS))
    with pytest.raises(ArgumentError, match="columns of"):
        Reordered(("Q8_0",), (7,), ((0, 0, 7),), (2, 2, 2)).parts((7, COLUMNS))
