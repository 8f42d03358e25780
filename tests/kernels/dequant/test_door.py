"""Arguments that `dequantize` accepts, and those that it refuses."""

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from offspec_kernels.backend import Backend
from offspec_kernels.dequant import Format, Part, dequantize
from offspec_kernels.dequant.format import Shape
from offspec_kernels.dequant.grouped import Grouped
from offspec_kernels.errors import ArgumentError
from tests.kernels.dequant.cases import DTYPES, PATHS, random_bytes
from tests.support.kernel_device import device_of

SHAPE = (4, 128)


class Turned(Format):
    """Float32 values that are stored as [columns, rows]."""

    __slots__ = ()
    name = "turned"
    transposed = True

    def parts(self, shape: Shape) -> dict[str, Part]:
        return {"values": Part(torch.float32, (shape[1], shape[0]))}

    def reference(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        return parts["values"].mT

    def eager(self, parts: Mapping[str, Tensor], shape: Shape, out: Tensor) -> None:
        out.copy_(parts["values"])

    triton = eager


def grouped() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "codes": random_bytes(0, 4, 64),
        "step": torch.rand(4, 2, generator=generator).half(),
        "offset": torch.randn(4, 2, generator=generator).half(),
    }


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_lie_in_the_memory_that_was_given(dtype: torch.dtype, path: Backend) -> None:
    device = device_of(path)
    out = torch.full((math.prod(SHAPE),), math.nan, dtype=dtype, device=device)
    parts = {name: part.to(device) for name, part in grouped().items()}
    found = dequantize(Grouped(4), parts, SHAPE, out, path=path)
    assert found.shape == SHAPE and found.dtype == dtype and found.data_ptr() == out.data_ptr()
    assert torch.equal(found.cpu(), Grouped(4).reference(grouped(), SHAPE).to(dtype))
    values = torch.randn(128, 4, device=device)
    found = dequantize(Turned(), {"values": values}, SHAPE, out, path=path)
    assert torch.equal(found, values.mT.to(dtype)) and found.data_ptr() == out.data_ptr()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("step", None, "step: missing part of a int4-g64 weight"),
        ("more", torch.zeros(1), "more: not a part of a int4-g64 weight"),
        ("step", torch.zeros(4, 2), "step: the dtype must be torch.float16, not torch.float32"),
        ("step", torch.zeros(2, 4).half().mT, "step: must be contiguous"),
        (
            "step",
            torch.zeros(4, 2, device="meta").half(),
            "step: must be on cpu like the first tensor, not on meta",
        ),
        ("codes", random_bytes(0, 4, 32), "codes: the shape for a int4-g64 weight of [4, 128]"),
        ("out", torch.zeros(511), "out: must be [512]"),
        ("out", torch.zeros(4, 128), "out: must be [512]"),
        ("out", torch.zeros(1024)[::2], "out: must be [512] and contiguous"),
        ("out", torch.zeros(512, dtype=torch.float64), "out: "),
    ],
)
def test_what_is_wrong_is_named(name: str, change: Tensor | None, message: str) -> None:
    parts, out = grouped(), torch.empty(512)
    if name == "out":
        assert change is not None
        out = change
    elif change is None:
        del parts[name]
    else:
        parts[name] = change
    with pytest.raises(ArgumentError) as caught:
        dequantize(Grouped(4), parts, SHAPE, out)
    assert str(caught.value).startswith(message) and caught.value.argument == name
