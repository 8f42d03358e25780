"""Rows and columns in another order, of one tensor or several: a plain gather of values, on every path."""

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from offspec_kernels.backend import Backend
from offspec_kernels.dequant.ggml import layout, reordered
from offspec_kernels.dequant.ggml.reordered import ReorderedGgml, StackedGgml
from tests.kernels.dequant.cases import PATHS, check, check_cut

COLUMNS = 96


def stored(kind: str, rows: int) -> tuple[Tensor, Tensor]:
    """A tensor of a GGUF file as bytes [rows, bytes], and its values."""
    number = gguf.GGMLQuantizationType[kind]
    data = np.random.default_rng(rows).standard_normal((rows, COLUMNS)).astype(np.float32)
    blocks = gguf.quantize(data, number).view(np.uint8).reshape(rows, -1)
    values = np.array(gguf.dequantize(blocks, number), np.float32)
    return torch.from_numpy(blocks.copy()), torch.from_numpy(values.reshape(rows, COLUMNS))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kinds", [("Q8_0", "Q8_0"), ("Q4_1", "F16"), ("F32", "Q5_1"), ("BF16", "Q4_0")])
def test_rows_of_one_tensor_and_of_two(kinds: tuple[str, str], path: Backend) -> None:
    (first, one), (second, two) = stored(kinds[0], 20), stored(kinds[1], 10)
    format = ReorderedGgml(kinds[:1], (20,), ((0, 0, 4), (0, 12, 8), (0, 4, 8)))
    wanted = one[[*range(4), *range(12, 20), *range(4, 12)]]
    check(format, {"blocks0": first}, (20, COLUMNS), wanted, path)
    format = ReorderedGgml(kinds, (20, 10), ((1, 0, 5), (0, 0, 3), (1, 5, 5), (0, 3, 17)))
    wanted = torch.cat([two[:5], one[:3], two[5:], one[3:]])
    check(format, {"blocks0": first, "blocks1": second}, (30, COLUMNS), wanted, path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tiles", [(3, 2, 16), (96, 1, 1), (4, 24, 1)])
def test_columns_that_cross_blocks(
    tiles: tuple[int, int, int], path: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reordered, "_ROWS", 3)
    blocks, values = stored("Q8_0", 7)
    first, second, size = tiles
    wanted = values[
        :, [(a * second + b) * size + i for b in range(second) for a in range(first) for i in range(size)]
    ]
    check(
        ReorderedGgml(("Q8_0",), (7,), ((0, 0, 7),), tiles), {"blocks0": blocks}, (7, COLUMNS), wanted, path
    )


def by_rows(format: StackedGgml, parts: dict[str, Tensor]) -> Tensor:
    """Float32, of one row after the other."""
    made = []
    for expert in range(len(parts["blocks0"])):
        rows = [(i, row) for i, count in enumerate(format.rows) for row in range(count)]
        if format.alternate:
            rows.sort(key=lambda place: place[1])
        for i, row in rows:
            kind = gguf.GGMLQuantizationType[format.kinds[i]]
            made.append(torch.from_numpy(gguf.dequantize(parts[f"blocks{i}"][expert, row].numpy(), kind)))
    values = torch.stack(made).float().view(len(parts["blocks0"]), -1, COLUMNS)
    return values.mT.contiguous() if format.turned else values


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("kinds", "rows", "alternate", "turned"),
    [
        (("MXFP4",), (6,), False, True),
        (("Q8_0", "Q4_0"), (6, 2), False, False),
        (("Q8_0", "Q4_0"), (6, 2), False, True),
        (("MXFP4", "MXFP4"), (6, 6), True, True),
        (("BF16", "Q8_0"), (6, 6), True, False),
    ],
)
def test_experts_in_several_tensors_or_turned(
    kinds: tuple[str, ...], rows: tuple[int, ...], alternate: bool, turned: bool, path: Backend
) -> None:
    format = StackedGgml(kinds, rows, alternate, turned)
    parts = dict[str, Tensor]()
    for i, kind in enumerate(kinds):
        parts[f"blocks{i}"] = stored(kind, 3 * rows[i])[0].view(3, rows[i], -1)
        assert parts[f"blocks{i}"].shape[2] == COLUMNS // layout(kind)[0] * layout(kind)[1]
    wanted = by_rows(format, parts)
    check(format, parts, tuple(wanted.shape), wanted, path)
    check_cut(format, parts, tuple(wanted.shape), wanted, path)
