"""FP8 weights, bit for bit as transformers and compressed-tensors have them, on every path."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from offspec_kernels.backend import Backend
from offspec_kernels.dequant.float8 import Float8
from tests.kernels.dequant.cases import (
    DTYPES,
    PATHS,
    check,
    check_cut,
    has_library_or_skip,
    library,
    same,
    scales,
    unpacked,
)
from tests.support.pairwise import all_pairs

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


BLOCKS = {"tensor": None, "channel": None, "block": (4, 88), "small blocks, odd scales": (1, 4)}


@pytest.mark.parametrize(("kind", "dtype", "path"), all_pairs(list(BLOCKS), DTYPES, PATHS))
def test_as_compressed_tensors(kind: str, dtype: torch.dtype, path: Backend) -> None:
    """In the dtype of the scales."""
    format = Float8(BLOCKS[kind], "block" if BLOCKS[kind] else kind, dtype)
    parts = make(format, odd=0.5 if "odd" in kind else 0.0)
    check(format, parts, SHAPE, by_compressed_tensors(format, parts, path), path)


@pytest.mark.parametrize(
    ("path", "per", "dtype"), all_pairs(PATHS, ["tensor", "block"], [torch.float32, torch.bfloat16])
)
def test_as_transformers(path: Backend, per: Any, dtype: torch.dtype) -> None:
    """In float32, whatever the dtype of the scales."""
    format = Float8((6, 132) if per == "block" else None, per, dtype, rounded=False)
    parts = make(format)
    scale = parts["scale"].view(1, 1) if per == "tensor" else parts["scale"]
    wanted = Fp8Dequantize(None)._dequantize_one(parts["weight"], scale, output_dtype=torch.float32)
    check(format, parts, SHAPE, wanted, path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("format", [Float8((4, 88), "block", rounded=False), Float8(None, "channel")])
def test_experts_in_one_weight(format: Float8, path: Backend) -> None:
    """They are what each is alone, and can be had alone."""
    parts = {name: part.view(3, -1, part.shape[-1]) for name, part in make(format).items()}
    shape = tuple(parts["weight"].shape)
    whole = unpacked(format, parts, shape, torch.float32, path)
    for expert in range(3):
        alone = {name: part[expert].contiguous() for name, part in parts.items()}
        same(whole[expert], unpacked(format, alone, shape[1:], torch.float32, "reference"))
    check_cut(format, parts, shape, whole, path)


@pytest.mark.parametrize("path", PATHS)
def test_blocks_cut_off_and_one_scale_in_any_shape(path: Backend) -> None:
    """The last blocks are smaller, and the others as large as ever."""
    format, shape = Float8((8, 128), "block"), (13, 300)
    parts = make(format, shape)
    assert parts["scale"].shape == (2, 3)
    rows, columns = torch.arange(13)[:, None] // 8, torch.arange(300)[None, :] // 128
    check(format, parts, shape, parts["weight"].float() * parts["scale"][rows, columns], path)
    format = Float8(None, "tensor")
    parts = make(format)
    wanted = parts["weight"].float() * parts["scale"]
    for size in ((), (1,), (1, 1)):
        check(format, parts | {"scale": parts["scale"].view(size)}, SHAPE, wanted, path)
