"""One expert of a fused weight, or some rows of a weight, are bitwise equal to the same part of the whole."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from offspec.checkpoint.safetensors import read_header
from offspec.checkpoint.tensors import PackedInfo, can_slice, slice_of, slice_rows, stored_tensors
from offspec_kernels.dequant import Format
from offspec_kernels.dequant.awq import Awq
from offspec_kernels.dequant.codebook import Codebook
from offspec_kernels.dequant.compressed import CompressedInt
from offspec_kernels.dequant.float4 import Mxfp4, Nvfp4
from offspec_kernels.dequant.float8 import Float8
from offspec_kernels.dequant.ggml import Ggml
from offspec_kernels.dequant.grouped import Grouped
from offspec_kernels.dequant.int8rows import Int8Rows
from tests.support.quantized_files import values_of

STACKS: list[tuple[Format, tuple[int, ...]]] = [
    (Mxfp4(), (5, 64, 24)),
    (Grouped(3), (5, 24, 64)),
    (Codebook("nf4", 64, torch.float16), (5, 24, 64)),
    *((Ggml(kind), (5, 24, 256)) for kind in ("Q8_0", "Q3_K", "Q4_K", "IQ4_XS", "MXFP4")),
]
MATRICES: list[tuple[Format, tuple[int, ...]]] = [
    (Grouped(4), (5, 128)),
    (Codebook("nf4", 64, torch.float16), (5, 128)),
    (Int8Rows(), (5, 24)),
    (CompressedInt(4, True, 32, False), (5, 64)),
    (Float8(None, "channel"), (5, 64)),
    (Nvfp4(), (5, 64)),
    (Ggml("Q4_K"), (5, 512)),
]
WHOLE: list[tuple[Format, tuple[int, ...]]] = [
    (Mxfp4(), (64, 24)),
    (Codebook("nf4", 128, torch.float16), (5, 64)),
    (Codebook("nf4", 64, torch.uint8, 4), (4, 64)),
    (Awq(32), (8, 64)),
    (Float8((16, 16), "block"), (32, 32)),
    (Ggml("Q4_0", heads=2), (16, 32)),
]


def written(folder: Path, format: Format, shape: tuple[int, ...]) -> PackedInfo:
    """Write a weight of random bytes, after a tensor of another size."""
    generator = torch.Generator().manual_seed(0)

    def some(dtype: torch.dtype, wanted: tuple[int, ...]) -> Tensor:
        if dtype in (torch.uint8, torch.int32, torch.int8):
            return torch.randint(0, 127, wanted, generator=generator).to(dtype)
        return torch.rand(wanted, generator=generator).to(dtype)

    tensors = {name: some(part.dtype, part.shape) for name, part in format.parts(shape).items()}
    save_file({"a": torch.ones(3), **tensors}, folder / "model.safetensors")
    found, _ = read_header(folder / "model.safetensors")
    return PackedInfo("experts", shape, format, tuple((name, found[name]) for name in tensors))


def same(found: Tensor, wanted: Tensor) -> bool:
    """Return whether values are equal; random bytes include NaN."""
    return torch.equal(found.nan_to_num(1e30), wanted.nan_to_num(1e30))


@pytest.mark.parametrize(("format", "shape"), [*STACKS, *MATRICES])
def test_slices_are_bitwise_equal(tmp_path: Path, format: Format, shape: tuple[int, ...]) -> None:
    weight = written(tmp_path, format, shape)
    whole = values_of(weight)
    assert can_slice(weight)
    pieces = [slice_of(weight, i) for i in range(5)]
    for i, piece in enumerate(pieces):
        assert piece.shape == (1, *shape[1:]) and piece.name == f"experts[{i}]"
        assert same(values_of(piece), whole[i : i + 1])
    assert same(values_of(slice_rows(weight, 1, 4)), whole[1:4])
    if len(shape) == 3:  # bytes are not shared
        assert sum(piece.nbytes - _table_bytes(weight) for piece in pieces) == (
            weight.nbytes - _table_bytes(weight)
        )


def _table_bytes(weight: PackedInfo) -> int:
    return sum(part.nbytes for name, part in weight.parts if name == "table")


@pytest.mark.parametrize(("format", "shape"), WHOLE)
def test_weights_that_cannot_be_sliced(tmp_path: Path, format: Format, shape: tuple[int, ...]) -> None:
    weight = written(tmp_path, format, shape)
    assert not can_slice(weight)
    with pytest.raises(ValueError, match="cannot be dequantized in slices"):
        slice_of(weight, 0)


def test_tensor_that_is_not_packed(tmp_path: Path) -> None:
    stored = {"experts": torch.randn(3, 4, 5).bfloat16(), "scale": torch.ones(())}
    save_file(stored, tmp_path / "model.safetensors")
    found, _ = read_header(tmp_path / "model.safetensors")
    weight = found["experts"]
    for i in range(3):
        piece = slice_of(weight, i)
        assert torch.equal(values_of(piece), stored["experts"][i : i + 1])
        assert stored_tensors(piece) == (piece,) and piece.file == weight.file
    for start, end in ((3, 4), (-1, 0), (2, 1)):
        with pytest.raises(IndexError, match="experts"):
            slice_rows(weight, start, end)
    assert not can_slice(found["scale"])
