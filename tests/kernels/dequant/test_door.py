"""What goes through the door of `dequantise`, and what does not."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from offspec_kernels.backend import Backend
from offspec_kernels.dequant import Format, Part, dequantise
from offspec_kernels.dequant.format import Shape
from offspec_kernels.dequant.grouped import Grouped
from offspec_kernels.dequant.int8rows import Int8Rows
from offspec_kernels.errors import ArgumentError
from tests.support.kernel_device import device_of

PATHS: list[Backend] = ["reference", "eager", "triton"]
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
        "codes": torch.randint(0, 256, (4, 64), generator=generator, dtype=torch.uint8),
        "step": torch.rand(4, 2, generator=generator).half(),
        "offset": torch.randn(4, 2, generator=generator).half(),
    }


def memory(dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
    return torch.full((math.prod(SHAPE),), math.nan, dtype=dtype, device=device)


def placed(parts: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: part.to(device) for name, part in parts.items()}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_lie_in_the_memory_that_was_given(dtype: torch.dtype, path: Backend) -> None:
    out = memory(dtype, device_of(path))
    found = dequantise(Grouped(4), placed(grouped(), out.device), SHAPE, out, path=path)
    assert found.shape == SHAPE and found.dtype == dtype and found.data_ptr() == out.data_ptr()
    assert torch.equal(found.cpu(), Grouped(4).reference(grouped(), SHAPE).to(dtype))


@pytest.mark.parametrize("path", PATHS)
def test_a_weight_that_is_made_transposed_is_a_view(path: Backend) -> None:
    values, out = torch.randn(128, 4, device=device_of(path)), memory(device=device_of(path))
    found = dequantise(Turned(), {"values": values}, SHAPE, out, path=path)
    assert torch.equal(found, values.mT) and torch.equal(out.view(128, 4), values)
    assert found.data_ptr() == out.data_ptr()


@pytest.mark.parametrize("path", PATHS)
def test_an_empty_weight(path: Backend) -> None:
    parts = placed({name: part[:0] for name, part in grouped().items()}, device_of(path))
    out = torch.empty(0, device=device_of(path))
    assert dequantise(Grouped(4), parts, (0, 128), out, path=path).shape == (0, 128)


def test_every_format_has_a_name_that_people_know() -> None:
    assert [Grouped(bits).name for bits in (2, 8)] == ["int2-g64", "int8-g64"]
    assert Int8Rows().name == "int8-rows"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("step", None, "step: a int4-g64 weight needs it"),
        ("more", torch.zeros(1), "more: a int4-g64 weight has no such part"),
        ("step", torch.zeros(4, 2), "step: the dtype must be torch.float16, not torch.float32"),
        ("step", torch.zeros(2, 4).half().mT, "step: it must be contiguous"),
        (
            "step",
            torch.zeros(4, 2).half().to("meta"),
            "step: it must be on cpu, as the first tensor is, not on",
        ),
        (
            "codes",
            torch.zeros(4, 32, dtype=torch.uint8),
            "codes: the shape for a int4-g64 weight of [4, 128]",
        ),
    ],
)
def test_other_parts_are_refused(name: str, change: Tensor | None, message: str) -> None:
    parts: dict[str, Any] = {**grouped(), name: change}
    if change is None:
        del parts[name]
    with pytest.raises(ArgumentError) as caught:
        dequantise(Grouped(4), parts, SHAPE, memory())
    assert str(caught.value).startswith(message) and caught.value.argument == name


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(511),
        torch.zeros(4, 128),
        torch.zeros(1024)[::2],
        torch.zeros(512, dtype=torch.float64),
        torch.zeros(512, dtype=torch.int16),
    ],
)
def test_memory_of_another_kind_is_refused(out: Tensor) -> None:
    with pytest.raises(ArgumentError) as caught:
        dequantise(Grouped(4), grouped(), SHAPE, out)
    assert caught.value.argument == "out"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_makes_the_same(dtype: torch.dtype) -> None:
    for bits in (2, 3, 4, 8):
        parts = {**grouped(), "codes": torch.randint(0, 256, (4, 16 * bits), dtype=torch.uint8)}
        wanted = Grouped(bits).reference(parts, SHAPE).to(dtype)
        there = {name: part.cuda() for name, part in parts.items()}
        found = dequantise(Grouped(bits), there, SHAPE, memory(dtype).cuda())
        assert torch.equal(found.cpu(), wanted)
