"""Experts of GGUF files, in several tensors or turned, against rows put in order one by one."""

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from offspec_kernels.backend import Backend
from offspec_kernels.dequant.ggml import layout
from offspec_kernels.dequant.ggml.stacked import Stacked
from offspec_kernels.errors import ArgumentError
from tests.kernels.dequant.scaled_cases import PATHS, unpacked

COLUMNS = 64


def blocks(kind: str, experts: int, rows: int, seed: int) -> Tensor:
    values = np.random.default_rng(seed).standard_normal((experts * rows, COLUMNS)).astype(np.float32)
    packed = gguf.quantize(values, gguf.GGMLQuantizationType[kind]).view(np.uint8)
    assert packed.shape[1] == COLUMNS // layout(kind)[0] * layout(kind)[1]
    return torch.from_numpy(np.array(packed)).view(experts, rows, -1)


def by_rows(format: Stacked, parts: dict[str, Tensor]) -> Tensor:
    """Float32, of one row after the other."""
    made = []
    for expert in range(len(parts["blocks0"])):
        rows: list[tuple[int, int]] = [
            (i, row) for i, count in enumerate(format.rows) for row in range(count)
        ]
        if format.alternate:
            rows.sort(key=lambda place: place[1])
        for i, row in rows:
            kind = gguf.GGMLQuantizationType[format.kinds[i]]
            made.append(torch.from_numpy(gguf.dequantize(parts[f"blocks{i}"][expert, row].numpy(), kind)))
    values = torch.stack(made).float().view(len(parts["blocks0"]), -1, COLUMNS)
    return values.mT.contiguous() if format.turned else values


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("kinds", "rows", "alternate"),
    [
        (("MXFP4",), (6,), False),
        (("Q8_0", "Q4_0"), (6, 2), False),
        (("MXFP4", "MXFP4"), (6, 6), True),
        (("BF16", "Q8_0"), (6, 6), True),
    ],
)
def test_every_layout(
    kinds: tuple[str, ...], rows: tuple[int, ...], alternate: bool, turned: bool, path: Backend
) -> None:
    format = Stacked(kinds, rows, alternate, turned)
    parts = {f"blocks{i}": blocks(kind, 3, rows[i], i) for i, kind in enumerate(kinds)}
    wanted = by_rows(format, parts)
    shape = tuple(wanted.shape)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(unpacked(format, parts, shape, dtype, path), wanted.to(dtype))
    found = format.cut(shape, 1, 3)
    assert found is not None
    some = {name: part[slice(*found[1][name])].contiguous() for name, part in parts.items()}
    assert torch.equal(unpacked(found[0], some, (2, *shape[1:]), torch.float32, path), wanted[1:3])


def test_what_cannot_be() -> None:
    for wrong, shape in (
        (Stacked(("Q8_0",), (6,)), (6, 64)),
        (Stacked(("Q8_0",), (6,)), (3, 8, 64)),
        (Stacked(("Q8_0",), (6,), turned=True), (3, 6, 64)),
        (Stacked(("Q8_0",), (6,)), (3, 6, 40)),
    ):
        with pytest.raises(ArgumentError) as caught:
            wrong.parts(shape)
        assert caught.value.argument == "shape"
    for kinds, rows, alternate in ((("Q8_0",), (6, 6), False), (("Q8_0", "Q8_0"), (6, 4), True)):
        with pytest.raises(ArgumentError, match="rows"):
            Stacked(kinds, rows, alternate)
