"""Location of a tensor on disk, and the dtype names of the safetensors format.

A slice of a weight's first dimension (rows or experts) can be addressed as a weight of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from offspec.core.errors import UnsupportedModelError
from offspec.core.files import FileStamp

if TYPE_CHECKING:
    import torch

    from offspec_kernels.dequant import Format

# Bits per element of every dtype name in the format, and torch's name for it ("" if it has none). The 4-bit
# and 6-bit dtypes pack elements across bytes.
_DTYPES = {
    "BOOL": (8, "bool"),
    "F4": (4, ""),
    "F6_E2M3": (6, ""),
    "F6_E3M2": (6, ""),
    "U8": (8, "uint8"),
    "I8": (8, "int8"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
    "I16": (16, "int16"),
    "U16": (16, "uint16"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "I32": (32, "int32"),
    "U32": (32, "uint32"),
    "F32": (32, "float32"),
    "C64": (64, "complex64"),
    "F64": (64, "float64"),
    "I64": (64, "int64"),
    "U64": (64, "uint64"),
}
DTYPE_BITS = {name: bits for name, (bits, _) in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Location of a tensor on disk.

    Args:
        name: Name in the checkpoint.
        dtype: Safetensors dtype name.
        shape: Shape of the tensor, row-major.
        file: File that holds the bytes (little-endian).
        offset: Bytes from the start of `file`.
        nbytes: Size in bytes.
        stamp: Identity of the file when its header was read; None if unknown.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int
    stamp: FileStamp | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class PackedInfo:
    """A quantized weight, stored in one or more tensors on disk.

    Args:
        name: Name of the weight in the model.
        shape: Shape of the weight in the model.
        format: How the parts are decoded.
        parts: The format's name for each stored tensor, and its location. Stored tensors keep their names.
    """

    name: str
    shape: tuple[int, ...]
    format: Format
    parts: tuple[tuple[str, TensorInfo], ...]

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum(part.nbytes for _, part in self.parts)

    @property
    def file(self) -> Path:
        """The file of the first part."""
        return self.parts[0][1].file


Weight = TensorInfo | PackedInfo


def stored_tensors(weight: Weight) -> tuple[TensorInfo, ...]:
    """Return the tensors that a weight is stored in."""
    if isinstance(weight, TensorInfo):
        return (weight,)
    return tuple(part for _, part in weight.parts)


def main_format(weights: Iterable[Weight]) -> str:
    """Return the format that most bytes of the weights have, such as "BF16"."""
    sizes = Counter[str]()
    for weight in weights:
        sizes[weight.dtype if isinstance(weight, TensorInfo) else weight.format.name] += weight.nbytes
    return sizes.most_common(1)[0][0] if sizes else ""


def item_size(dtype: str) -> int:
    """Return the bytes per element. Raises UnsupportedModelError for an unknown dtype or one under a byte."""
    bits = DTYPE_BITS.get(dtype, 0)
    if bits < 8:
        raise UnsupportedModelError(f"tensors of dtype {dtype} cannot be addressed element by element")
    return bits // 8


def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor; `dtype` is in `DTYPE_BITS`. Raises ValueError for a partial byte."""
    bits = DTYPE_BITS[dtype] * math.prod(shape)
    if bits % 8:
        raise ValueError(f"a {dtype} tensor of shape {list(shape)} ends inside a byte")
    return bits // 8


def dtype_name(dtype: torch.dtype) -> str:
    """Return the safetensors name of a torch dtype. Raises KeyError if the format has no name for it."""
    return {torch_name: name for name, (_, torch_name) in _DTYPES.items()}[str(dtype).removeprefix("torch.")]


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype for a safetensors dtype name. Raises UnsupportedModelError if torch has none."""
    import torch

    found = getattr(torch, _DTYPES.get(name, (0, ""))[1], None)
    if not isinstance(found, torch.dtype):
        raise UnsupportedModelError(f"torch has no dtype for {name} tensors")
    return found


def can_slice(weight: Weight) -> bool:
    """Return whether `slice_rows` and `slice_of` can address parts of the weight's first dimension."""
    return weight.shape != () and weight.shape[0] > 0 and _cut(weight, 0, 1) is not None


def slice_of(weight: Weight, index: int) -> Weight:
    """Return element `index` of a weight's first dimension, such as one expert of a layer: shape [1, ...]."""
    return replace(slice_rows(weight, index, index + 1), name=f"{weight.name}[{index}]")


def slice_rows(weight: Weight, start: int, end: int) -> Weight:
    """Return the location of elements [start, end) of a weight's first dimension.

    The weight and the tensors it is stored in keep their names. Raises ValueError unless
    `can_slice(weight)`, and IndexError for a range outside the weight.
    """
    if not weight.shape or not 0 <= start <= end <= weight.shape[0]:
        raise IndexError(f"{weight.name} of {list(weight.shape)} has no elements {start} to {end}")
    found = _cut(weight, start, end)
    if found is None:
        raise ValueError(f"{weight.name} cannot be dequantized in slices")
    return found


def _cut(weight: Weight, start: int, end: int) -> Weight | None:
    if isinstance(weight, TensorInfo):
        return _range_of(weight, start, end)
    found = weight.format.slice_rows(weight.shape, start, end)
    if found is None:
        return None
    format, ranges = found
    whole = weight.format.parts(weight.shape)
    parts = list[tuple[str, TensorInfo]]()
    for name, info in weight.parts:
        if name in ranges and info.shape[:1] != whole[name].shape[:1]:  # stored in a different shape
            return None
        parts.append((name, _range_of(info, *ranges[name]) if name in ranges else info))
    return PackedInfo(weight.name, (end - start, *weight.shape[1:]), format, tuple(parts))


def _range_of(info: TensorInfo, start: int, end: int) -> TensorInfo:
    each = info.nbytes // info.shape[0]
    shape = (end - start, *info.shape[1:])
    return replace(info, shape=shape, offset=info.offset + start * each, nbytes=(end - start) * each)
