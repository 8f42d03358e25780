"""FP8 weights, bit for bit as transformers and compressed-tensors have them, on every path."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from offspec_kernels.backend import Backend
from offspec_kernels.dequant import dequantise
from offspec_kernels.dequant.float8 import Float8
from offspec_kernels.errors import ArgumentError
from tests.kernels.dequant.scaled_cases import (
    DTYPES,
    PATHS,
    check,
    has_library_or_skip,
    library,
    scales,
    unpacked,
)

SHAPE = (12, 264)


def make(format: Float8, shape: tuple[int, int] = SHAPE, odd: float = 0.0) -> dict[str, Tensor]:
    """Every byte that there is, over and over."""
    byte = (torch.arange(shape[0] * shape[1]) * 7 % 256).to(torch.uint8).view(shape)
    scale = scales(0, format.scales, *format.parts(shape)["scale"].shape, odd=odd)
    return {"weight": byte.view(torch.float8_e4m3fn), "scale": scale}


def by_compressed_tensors(format: Float8, parts: dict[str, Tensor], path: Backend) -> Tensor:
    if not has_library_or_skip("compressed_tensors", path):
        return format.reference(parts, SHAPE)
    quantization = library("compressed_tensors.quantization")
    compressors = library("compressed_tensors.compressors")
    strategy: dict[str, Any] = {"strategy": format.per}
    if format.block:
        strategy["block_structure"] = list(format.block)
    arguments = quantization.QuantizationArgs(num_bits=8, type="float", **strategy)
    state = {"weight": parts["weight"], "weight_scale": parts["scale"]}
    kind = compressors.BaseCompressor.get_value_from_registry("float-quantized")
    made = kind.decompress(state, quantization.QuantizationScheme(targets=[], weights=arguments))
    values: Tensor = made["weight"].float()
    return values


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per", ["tensor", "channel", "block"])
def test_as_compressed_tensors(per: Any, dtype: torch.dtype, path: Backend) -> None:
    """In the dtype of the scales."""
    format = Float8((4, 88) if per == "block" else None, per, dtype)
    parts = make(format)
    check(format, parts, SHAPE, by_compressed_tensors(format, parts, path), path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("format", [Float8((4, 88), "block", rounded=False), Float8(None, "channel")])
def test_experts_in_one_weight(format: Float8, path: Backend) -> None:
    """They are what each is alone, and can be had alone."""
    parts = {name: part.view(3, -1, part.shape[-1]) for name, part in make(format).items()}
    shape = tuple(parts["weight"].shape)
    whole = unpacked(format, parts, shape, torch.float32, path)
    found = format.cut(shape, 1, 2)
    assert found is not None
    for expert in range(3):
        alone = {name: part[expert].contiguous() for name, part in parts.items()}
        wanted = unpacked(format, alone, shape[1:], torch.float32, "reference")
        assert torch.equal(whole[expert].nan_to_num(9e9), wanted.nan_to_num(9e9))
    some = {name: part[slice(*found[1][name])].contiguous() for name, part in parts.items()}
    made = unpacked(found[0], some, (1, *shape[1:]), torch.float32, path)
    assert torch.equal(made.nan_to_num(9e9), whole[1:2].nan_to_num(9e9))
    with pytest.raises(ArgumentError, match="whole blocks"):
        Float8((8, 88), "block").parts(shape)
    with pytest.raises(ArgumentError, match="shape"):
        Float8(None, "tensor").parts(shape)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_scales(dtype: torch.dtype, path: Backend) -> None:
    format = Float8((1, 4), "block", dtype)
    parts = make(format, odd=0.5)
    check(format, parts, SHAPE, by_compressed_tensors(format, parts, path), path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("per", ["tensor", "block"])
def test_as_transformers(per: Any, dtype: torch.dtype, path: Backend) -> None:
    """In float32, whatever the dtype of the scales."""
    format = Float8((6, 132) if per == "block" else None, per, dtype, rounded=False)
    parts = make(format)
    scale = parts["scale"].view(1, 1) if per == "tensor" else parts["scale"]
    wanted = Fp8Dequantize(None)._dequantize_one(parts["weight"], scale, output_dtype=torch.float32)
    check(format, parts, SHAPE, wanted, path)


@pytest.mark.parametrize("path", PATHS)
def test_blocks_cut_off(path: Backend) -> None:
    """The last blocks are smaller, and the others as large as ever."""
    format, shape = Float8((8, 128), "block"), (13, 300)
    parts = make(format, shape)
    assert parts["scale"].shape == (2, 3)
    rows, columns = torch.arange(13)[:, None] // 8, torch.arange(300)[None, :] // 128
    check(format, parts, shape, parts["weight"].float() * parts["scale"][rows, columns], path)


@pytest.mark.parametrize("path", PATHS)
def test_one_scale_in_any_shape(path: Backend) -> None:
    format = Float8(None, "tensor")
    parts = make(format)
    wanted = parts["weight"].float() * parts["scale"]
    for shape in ((), (1,), (1, 1)):
        check(format, parts | {"scale": parts["scale"].view(shape)}, SHAPE, wanted, path)


def test_rows_alone() -> None:
    format = Float8(None, "channel")
    assert format.by_rows and not Float8((4, 4), "block").by_rows
    parts = make(format)
    some = {name: part[3:5].contiguous() for name, part in parts.items()}
    values = dequantise(format, some, (2, 264), torch.empty(528))
    assert torch.equal(values.nan_to_num(), format.reference(parts, SHAPE)[3:5].nan_to_num())


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"scale": torch.zeros(3, 3)}, "scale"),
        ({"scale": torch.zeros(3, 2, dtype=torch.bfloat16)}, "scale"),
        ({"weight": torch.zeros(SHAPE, dtype=torch.float8_e5m2)}, "weight"),
    ],
)
def test_wrong_parts(change: dict[str, Tensor], argument: str) -> None:
    format = Float8((4, 132), "block")
    with pytest.raises(ArgumentError) as caught:
        dequantise(format, make(format) | change, SHAPE, torch.empty(12 * 264))
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("block", "per", "argument"),
    [(None, "block", "block"), ((8, 8), "tensor", "block"), ((0, 8), "block", "block"), (None, "row", "per")],
)
def test_what_cannot_be(block: Any, per: Any, argument: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        Float8(block, per)
    assert caught.value.argument == argument
