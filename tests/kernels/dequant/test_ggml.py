"""llama.cpp's types, bit for bit as the gguf package unpacks them, on every path."""

import math
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offspec.checkpoint.gguf.header import read_gguf
from offspec.checkpoint.open import embedded_model
from offspec_kernels.backend import Backend
from offspec_kernels.dequant import dequantise
from offspec_kernels.dequant.ggml import FLOATS, KINDS, Ggml, layout
from offspec_kernels.errors import ArgumentError
from tests.kernels.dequant import scaled_cases

PATHS: list[Backend] = ["reference", "eager", "triton"]
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


def unpacked(
    format: Ggml, blocks: Tensor, shape: tuple[int, ...], dtype: torch.dtype, path: Backend
) -> Tensor:
    return scaled_cases.unpacked(format, {"blocks": blocks}, shape, dtype, path)


def check(found: Tensor, wanted: Tensor) -> None:
    """The same bits; any number that is none is as good as another."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    assert torch.equal(found.isnan(), wanted.isnan())
    integers = {2: torch.int16, 4: torch.int32}[found.dtype.itemsize]
    assert torch.equal(found.nan_to_num(0.0).view(integers), wanted.nan_to_num(0.0).view(integers))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_the_library(kind: str, path: Backend) -> None:
    blocks = packed(kind, 3, 5, 0)
    wanted = by_gguf(kind, blocks)
    shape = tuple(wanted.shape)
    check(unpacked(Ggml(kind), blocks, shape, torch.float32, path), wanted)
    check(unpacked(Ggml(kind), blocks, shape, torch.bfloat16, path), wanted.bfloat16())


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 20),
    st.integers(1, 5),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 99),
)
def test_any_size(kind: str, rows: int, across: int, dtype: torch.dtype, seed: int) -> None:
    blocks = packed(kind, rows, across, seed)
    wanted = by_gguf(kind, blocks)
    shape = (rows, wanted.shape[1])
    check(Ggml(kind).reference({"blocks": blocks}, shape), wanted)
    check(unpacked(Ggml(kind), blocks, shape, dtype, "eager"), wanted.to(dtype))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_heads_in_order(kind: str, path: Backend) -> None:
    blocks = packed(kind, 24, 2, 1)
    wanted = turned(by_gguf(kind, blocks), 3)
    found = unpacked(Ggml(kind, heads=3), blocks, tuple(wanted.shape), torch.bfloat16, path)
    check(found, wanted.bfloat16())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", FLOATS)
def test_floats_of_one_dimension(kind: str, path: Backend) -> None:
    blocks = packed(kind, 1, 24, 2, odd=0)[0]
    values = by_gguf(kind, blocks)
    check(unpacked(Ggml(kind, less_one=True), blocks, (24,), torch.bfloat16, path), (values - 1).bfloat16())
    check(unpacked(Ggml(kind, heads=2), blocks, (24,), torch.float32, path), turned(values, 2))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["Q4_1", "F16"])
def test_stacked_experts_at_any_offset(kind: str, path: Backend) -> None:
    blocks = packed(kind, 6, 64, 3)
    moved = torch.zeros(blocks.numel() + 1, dtype=torch.uint8)[1:].view(2, 3, -1)
    moved.copy_(blocks.view(2, 3, -1))
    wanted = by_gguf(kind, blocks).view(2, 3, -1)
    check(unpacked(Ggml(kind), moved, tuple(wanted.shape), torch.float32, path), wanted)


def test_several_threads() -> None:
    blocks = packed("Q4_K", 64, 8, 4)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        found = unpacked(Ggml("Q4_K", heads=2), blocks, (64, 2048), torch.float32, "eager")
    finally:
        torch.set_num_threads(threads)
    check(found, turned(by_gguf("Q4_K", blocks), 2))


def test_a_real_model() -> None:
    header = read_gguf(embedded_model())
    seen = set()
    for tensor in header.tensors.values():
        kind = tensor.kind.name
        if kind in seen:
            continue
        seen.add(kind)
        rows = min(tensor.shape[0], 64) if len(tensor.shape) > 1 else 1
        count = tensor.nbytes // math.prod(tensor.shape[:-1]) * rows
        blocks = torch.from_numpy(np.fromfile(header.path, np.uint8, count, offset=tensor.offset)).view(
            rows, -1
        )
        wanted = by_gguf(kind, blocks)
        check(Ggml(kind).reference({"blocks": blocks}, tuple(wanted.shape)), wanted)
        check(unpacked(Ggml(kind), blocks, tuple(wanted.shape), torch.float32, "eager"), wanted)
    assert "Q4_1" in seen


@pytest.mark.parametrize(
    "arguments, shape, argument",
    [
        ({"kind": "Q4_2"}, (1, 32), "kind"),
        ({"kind": "Q4_0", "heads": -1}, (1, 32), "heads"),
        ({"kind": "Q4_0", "less_one": True}, (1, 32), "less_one"),
        ({"kind": "Q4_0"}, (1, 33), "shape"),
        ({"kind": "Q6_K"}, (8, 128), "shape"),
        ({"kind": "F32"}, (), "shape"),
        ({"kind": "Q8_0", "heads": 4}, (12, 32), "shape"),
        ({"kind": "Q8_0", "heads": 4}, (32,), "shape"),
        ({"kind": "F32", "heads": 4}, (12,), "shape"),
    ],
)
def test_refused(arguments: dict[str, Any], shape: tuple[int, ...], argument: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        Ggml(**arguments).parts(shape)
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    "blocks", [torch.zeros(2, 33, dtype=torch.uint8), torch.zeros(2, 34, dtype=torch.int8), torch.zeros(68)]
)
def test_wrong_parts_are_refused(blocks: Tensor) -> None:
    with pytest.raises(ArgumentError) as caught:
        dequantise(Ggml("Q8_0"), {"blocks": blocks}, (2, 32), torch.zeros(64))
    assert caught.value.argument == "blocks"
