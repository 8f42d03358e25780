"""llama.cpp's types, bit for bit as the gguf package unpacks them, on every path."""

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offspec_kernels.backend import Backend
from offspec_kernels.dequant.ggml import FLOATS, KINDS, Ggml, layout
from tests.kernels.dequant.cases import PATHS, check, same, unpacked

# Where the float16 numbers of a block are.
HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "F16"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}
# Subnormal ones, both zeros, the largest, and what no file should have.
ODD = (0x0001, 0x03FF, 0x8001, 0x0000, 0x8000, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFFFF)


def packed(kind: str, rows: int, across: int, seed: int, odd: float = 0.2) -> Tensor:
    """Blocks of random bytes, uint8 [rows, bytes], a share `odd` of whose scales are odd."""
    nbytes = layout(kind)[1]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows * across, nbytes), dtype=np.uint8)
    for start in HALVES.get(kind, ()):
        scales = random.standard_normal(len(blocks)).astype(np.float16).view(np.uint16)
        drawn = np.where(random.random(len(blocks)) < odd, random.choice(ODD, len(blocks)), scales)
        blocks[:, start : start + 2] = drawn.astype("<u2").view(np.uint8).reshape(-1, 2)
    return torch.from_numpy(blocks.reshape(rows, across * nbytes))


def by_gguf(kind: str, blocks: Tensor) -> Tensor:
    with np.errstate(all="ignore"):
        values = gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(np.array(values, dtype=np.float32))


def turned(values: Tensor, heads: int) -> Tensor:
    """Row 2 j + i of a head is row j of its half i."""
    rows = len(values) // heads
    order = [head * rows + 2 * j + i for head in range(heads) for i in range(2) for j in range(rows // 2)]
    return values[order]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_the_library(kind: str, path: Backend) -> None:
    """And rows of heads in order."""
    blocks = packed(kind, 12, 2, 0)
    values = by_gguf(kind, blocks)
    shape, parts = tuple(values.shape), {"blocks": blocks}
    same(unpacked(Ggml(kind), parts, shape, torch.float32, path), values)
    wanted = turned(values, 3).bfloat16()
    same(unpacked(Ggml(kind, heads=3), parts, shape, torch.bfloat16, path), wanted)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=6, deadline=None)
@given(
    st.integers(1, 20),
    st.integers(1, 5),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 99),
)
def test_any_size(kind: str, rows: int, across: int, dtype: torch.dtype, seed: int) -> None:
    blocks = packed(kind, rows, across, seed)
    wanted = by_gguf(kind, blocks)
    found = unpacked(Ggml(kind), {"blocks": blocks}, (rows, wanted.shape[1]), dtype, "eager")
    same(found, wanted.to(dtype))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", FLOATS)
def test_floats_of_one_dimension(kind: str, path: Backend) -> None:
    parts = {"blocks": packed(kind, 1, 24, 2, odd=0)[0]}
    values = by_gguf(kind, parts["blocks"])
    same(unpacked(Ggml(kind, less_one=True), parts, (24,), torch.bfloat16, path), (values - 1).bfloat16())
    same(unpacked(Ggml(kind, heads=2), parts, (24,), torch.float32, path), turned(values, 2))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["Q4_1", "F16"])
def test_stacked_experts_at_any_offset(kind: str, path: Backend) -> None:
    blocks = packed(kind, 6, 64, 3)
    moved = torch.zeros(blocks.numel() + 1, dtype=torch.uint8)[1:].view(2, 3, -1)
    moved.copy_(blocks.view(2, 3, -1))
    wanted = by_gguf(kind, blocks).view(2, 3, -1)
    same(unpacked(Ggml(kind), {"blocks": moved}, tuple(wanted.shape), torch.float32, path), wanted)


def test_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    blocks = packed("Q4_K", 64, 8, 4)
    check(Ggml("Q4_K", heads=2), {"blocks": blocks}, (64, 2048), turned(by_gguf("Q4_K", blocks), 2), "eager")
