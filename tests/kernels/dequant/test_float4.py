"""MXFP4 and NVFP4, bit for bit as transformers and compressed-tensors have them, on every path."""

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from offspec_kernels.backend import Backend
from offspec_kernels.dequant.float4 import Mxfp4, Nvfp4
from tests.kernels.dequant.cases import PATHS, check_cut, library, random_bytes, same, unpacked

STACK = (3, 96, 40)  # [experts, columns, rows]


def nvfp4(shape: tuple[int, int]) -> dict[str, Tensor]:
    """Every scale that there is, over and over."""
    wanted = Nvfp4().parts(shape)
    scale = torch.arange(shape[0] * shape[1] // 16) * 7 % 127
    return {
        "weight": random_bytes(0, *wanted["weight"].shape),
        "scale": scale.to(torch.uint8).view(wanted["scale"].shape).view(torch.float8_e4m3fn),
        "global_scale": torch.tensor([437.7]),
    }


# The smallest scales make subnormal numbers, which Triton's interpreter rounds otherwise.
@pytest.mark.parametrize(
    ("path", "every"), [("triton", False), *product(("reference", "eager"), (False, True))]
)
def test_mxfp4_as_transformers(every: bool, path: Backend) -> None:
    wanted = Mxfp4().parts(STACK)
    parts = {name: random_bytes(len(name), *part.shape) for name, part in wanted.items()}
    if not every:
        parts["scales"].clamp_(100, 140)
    for dtype in (torch.float32, torch.bfloat16):
        values = convert_moe_packed_tensors(parts["blocks"], parts["scales"], dtype=dtype)
        assert values.shape == STACK
        same(unpacked(Mxfp4(), parts, STACK, dtype, path), values)
    check_cut(Mxfp4(), parts, STACK, unpacked(Mxfp4(), parts, STACK, torch.float32, path), path)


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
@pytest.mark.parametrize("shape", [(3, 48), (70, 1040)])
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
