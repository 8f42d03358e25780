"""Integers of compressed-tensors, bit for bit as the library has them, on every path."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offspec_kernels.backend import Backend
from offspec_kernels.dequant import dequantize
from offspec_kernels.dequant.compressed import CompressedInt
from offspec_kernels.errors import ArgumentError
from tests.kernels.dequant.cases import DTYPES, PATHS, check, has_library_or_skip, library, scales
from tests.support.pairwise import all_pairs


def codes(seed: int, bits: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << bits - 1), 1 << bits - 1, shape, generator=generator).to(torch.int8)


def pack_to_int32(codes: Tensor, bits: int, dim: int = 1) -> Tensor:
    """int32 words of int8 codes along a dimension [rows or columns]: a stream of bits, the lowest first."""
    lines = codes if dim else codes.T
    length = -(-lines.shape[1] * bits // 32) * 32
    unsigned = lines.numpy().astype(np.int64) + (1 << bits - 1)
    stream = np.zeros((len(lines), length), np.uint8)
    stream[:, : lines.shape[1] * bits] = (unsigned[:, :, None] >> np.arange(bits) & 1).reshape(len(lines), -1)
    words = torch.from_numpy(np.packbits(stream, axis=1, bitorder="little").view("<i4"))
    return words if dim else words.T.contiguous()


def test_words_are_those_of_the_library() -> None:
    helpers = library("compressed_tensors.compressors.pack_quantized.helpers")
    for bits in range(1, 9):
        given = codes(bits, bits, 9, 45)
        for dim in (0, 1):
            assert torch.equal(pack_to_int32(given, bits, dim), helpers.pack_to_int32(given, bits, dim))


def make(format: CompressedInt, shape: tuple[int, int], seed: int = 0, odd: float = 0.0) -> dict[str, Tensor]:
    each = format.parts(shape)["scale"].shape
    weight, zeros = codes(seed, format.bits, *shape), codes(seed + 1, format.bits, *each)
    parts = {"weight": weight, "scale": scales(seed + 2, format.scales, *each, odd=odd)}
    if format.packed:
        parts["weight"] = pack_to_int32(weight, format.bits)
    if format.zero_point:
        parts["zero_point"] = pack_to_int32(zeros, format.bits, 0) if format.packs_zeros else zeros
    if format.act_order:
        generator = torch.Generator().manual_seed(seed)
        groups = torch.arange(shape[1], dtype=torch.int32) // (format.group or 1)
        parts["g_idx"] = groups[torch.randperm(shape[1], generator=generator)]
    return parts


def by_library(
    format: CompressedInt, parts: dict[str, Tensor], shape: tuple[int, int], path: Backend
) -> Tensor:
    if not has_library_or_skip("compressed_tensors", path):
        return format.reference(parts, shape)
    quantization = library("compressed_tensors.quantization")
    compressors = library("compressed_tensors.compressors")
    strategy = {None: "channel", 0: "tensor"}.get(format.group, "group")
    arguments = quantization.QuantizationArgs(
        num_bits=format.bits,
        symmetric=not format.zero_point,
        strategy=strategy,
        group_size=format.group or None,
    )
    state = {"weight_scale": parts["scale"]}
    if format.zero_point:
        state["weight_zero_point"] = parts["zero_point"]
    if format.packed:
        state |= {"weight_packed": parts["weight"], "weight_shape": torch.tensor(shape)}
    else:
        state["weight"] = parts["weight"]
    name = "pack-quantized" if format.packed else "int-quantized"
    kind = compressors.BaseCompressor.get_value_from_registry(name)
    made = kind.decompress(state, quantization.QuantizationScheme(targets=[], weights=arguments))
    values: Tensor = made["weight"].float()
    return values


@pytest.mark.parametrize(
    ("bits", "group", "path", "dtype", "zero_point"),
    all_pairs([*range(1, 9), "bytes"], [None, 0, 32, 8], PATHS, DTYPES, [False, True]),
)
def test_as_the_library(
    bits: int | str, group: int | None, path: Backend, dtype: torch.dtype, zero_point: bool
) -> None:
    packed, shape = isinstance(bits, int), (9, 96)
    format = CompressedInt(bits if isinstance(bits, int) else 8, packed, group, zero_point, scales=dtype)
    parts = make(format, shape, odd=0.5 if group == 8 else 0.0)
    check(format, parts, shape, by_library(format, parts, shape, path), path)


@settings(max_examples=10, deadline=None)
@given(
    bits=st.integers(1, 8),
    rows=st.integers(1, 40),
    groups=st.integers(1, 5),
    size=st.integers(1, 70),
    zero_point=st.booleans(),
    seed=st.integers(0, 99),
)
def test_words_cut_off(bits: int, rows: int, groups: int, size: int, zero_point: bool, seed: int) -> None:
    format, shape = CompressedInt(bits, True, size, zero_point), (rows, groups * size)
    parts = make(format, shape, seed)
    wanted = by_library(format, parts, shape, "eager")
    check(format, parts, shape, wanted, "reference")
    check(format, parts, shape, wanted, "eager")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("packed", [False, True])
def test_act_order(packed: bool, path: Backend) -> None:
    """Columns put in the order of their groups are those of a weight without the order."""
    format, shape = CompressedInt(4, packed, 32, True, act_order=True), (9, 96)
    parts = make(format, shape)
    order = parts["g_idx"].argsort(stable=True)
    sorted_parts = {name: part for name, part in parts.items() if name != "g_idx"}
    if packed:
        sorted_parts["weight"] = pack_to_int32(codes(0, 4, *shape)[:, order], 4)
    else:
        sorted_parts["weight"] = parts["weight"][:, order]
    wanted = torch.empty(shape)
    wanted[:, order] = by_library(CompressedInt(4, packed, 32, True), sorted_parts, shape, path)
    check(format, parts, shape, wanted, path)


@pytest.mark.parametrize("path", ["reference", "eager"])
def test_no_such_group(path: Backend) -> None:
    format, shape = CompressedInt(4, True, 32, False, act_order=True), (8, 64)
    for index in (-1, 2):
        parts = make(format, shape)
        parts["g_idx"][5] = index
        with pytest.raises(ArgumentError) as caught:
            dequantize(format, parts, shape, torch.empty(8 * 64), path=path)
        assert caught.value.argument == "g_idx"


@pytest.mark.parametrize("path", PATHS)
def test_scales_without_their_second_dimension(path: Backend) -> None:
    shape = (9, 64)
    for format in (CompressedInt(8, False, None, True), CompressedInt(8, False, 0, True)):
        parts = make(format, shape)
        wanted = by_library(format, parts, shape, path)
        for name in ("scale", "zero_point"):
            parts[name] = parts[name].squeeze()
        check(format, parts, shape, wanted, path)
