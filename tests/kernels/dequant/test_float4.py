"""MXFP4 and NVFP4, bit for bit as transformers and compressed-tensors have them, on every path."""

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from offspec_kernels.backend import Backend
from offspec_kernels.dequant import Format, dequantise
from offspec_kernels.dequant.float4 import Mxfp4, Nvfp4
from offspec_kernels.errors import ArgumentError
from tests.kernels.dequant.scaled_cases import PATHS, library, unpacked

STACK = (3, 96, 40)  # [experts, columns, rows]


def bytes_(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def mxfp4(shape: tuple[int, ...] = STACK, every: bool = False) -> dict[str, Tensor]:
    """every: all scales that there are, of which the smallest make subnormal numbers."""
    wanted = Mxfp4().parts(shape)
    scales = bytes_(1, *wanted["scales"].shape)
    return {
        "blocks": bytes_(0, *wanted["blocks"].shape),
        "scales": scales if every else scales.clamp(100, 140),
    }


def nvfp4(shape: tuple[int, int]) -> dict[str, Tensor]:
    """Every scale that there is, over and over."""
    wanted = Nvfp4().parts(shape)
    scale = torch.arange(shape[0] * shape[1] // 16) * 7 % 127
    return {
        "weight": bytes_(0, *wanted["weight"].shape),
        "scale": scale.to(torch.uint8).view(wanted["scale"].shape).view(torch.float8_e4m3fn),
        "global_scale": torch.tensor([437.7]),
    }


def same(found: Tensor, wanted: Tensor) -> None:
    """To the bit, but for numbers that are none."""
    number = ~wanted.isnan()
    integers = {2: torch.int16, 4: torch.int32}[wanted.dtype.itemsize]
    assert found.dtype == wanted.dtype and torch.equal(number, ~found.isnan())
    assert torch.equal(found[number].view(integers), wanted[number].view(integers))


# Triton's interpreter rounds subnormal bfloat16 otherwise.
@pytest.mark.parametrize(
    ("path", "every"), [("triton", False), *product(("reference", "eager"), (False, True))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_as_transformers(every: bool, dtype: torch.dtype, path: Backend) -> None:
    parts = mxfp4(every=every)
    wanted = convert_moe_packed_tensors(parts["blocks"], parts["scales"], dtype=dtype)
    assert wanted.shape == STACK
    same(unpacked(Mxfp4(), parts, STACK, dtype, path), wanted)


@pytest.mark.parametrize("path", PATHS)
def test_one_expert_of_mxfp4(path: Backend) -> None:
    parts = mxfp4()
    whole = unpacked(Mxfp4(), parts, STACK, torch.float32, path)
    found = Mxfp4().cut(STACK, 1, 2)
    assert found is not None
    format, ranges = found
    alone = {name: part[slice(*ranges[name])].contiguous() for name, part in parts.items()}
    same(unpacked(format, alone, (1, *STACK[1:]), torch.float32, path), whole[1:2])


@pytest.mark.parametrize("path", PATHS)
def test_nvfp4_as_compressed_tensors(path: Backend) -> None:
    """Whose values are bfloat16, with scales that are divided."""
    quantization = library("compressed_tensors.quantization")
    shape = (48, 176)
    parts = nvfp4(shape)
    arguments = quantization.QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", group_size=16
    )
    state = {
        "weight_packed": parts["weight"],
        "weight_scale": parts["scale"],
        "weight_global_scale": parts["global_scale"],
    }
    compressors = library("compressed_tensors.compressors")
    kind = compressors.BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    scheme = quantization.QuantizationScheme(targets=[], weights=arguments)
    wanted = kind.decompress(state, scheme)["weight"]
    assert wanted.dtype == torch.bfloat16
    format = Nvfp4(divided=True, dtype=torch.bfloat16)
    same(unpacked(format, parts, shape, torch.bfloat16, path), wanted)
    same(unpacked(format, parts, shape, torch.float32, path), wanted.float())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", [(1, 16), (3, 48), (70, 1040)])
def test_nvfp4_one_by_one(shape: tuple[int, int], path: Backend) -> None:
    values = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    parts = nvfp4(shape)
    parts["global_scale"] = parts["global_scale"][0]  # as modelopt has it
    wanted = np.empty(shape, np.float32)
    codes, scale = parts["weight"].numpy(), parts["scale"].float().numpy()
    for row, column in np.ndindex(*shape):
        code = codes[row, column // 2] >> column % 2 * 4 & 15
        value = np.float32(-values[code & 7] if code > 7 else values[code])
        wanted[row, column] = value * (scale[row, column // 16] * np.float32(437.7))
    same(unpacked(Nvfp4(), parts, shape, torch.float32, path), torch.from_numpy(wanted))


@pytest.mark.parametrize(
    ("format", "shape"), [(Mxfp4(), (3, 40, 96)), (Mxfp4(), (32,)), (Nvfp4(), (4, 24)), (Nvfp4(), (1, 4, 32))]
)
def test_shapes_that_cannot_be(format: Format, shape: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError) as caught:
        format.parts(shape)
    assert caught.value.argument == "shape"


def test_wrong_parts() -> None:
    for name, part in (("blocks", bytes_(0, 3, 40, 3, 8)), ("scales", bytes_(0, 3, 40, 2))):
        with pytest.raises(ArgumentError) as caught:
            unpacked(Mxfp4(), mxfp4() | {name: part}, STACK, torch.float32, "eager")
        assert caught.value.argument == name
    with pytest.raises(ArgumentError, match="dtype"):
        Nvfp4(dtype=torch.float64)


@pytest.mark.gpu
def test_a_gpu_makes_the_same() -> None:
    parts = mxfp4()
    wanted = Mxfp4().reference(parts, STACK)
    there = {name: part.cuda() for name, part in parts.items()}
    out = torch.zeros(wanted.numel(), device="cuda")
    assert torch.equal(dequantise(Mxfp4(), there, STACK, out).cpu(), wanted)
