"""Common base of all storage formats of weights."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from math import prod
from typing import Any

import torch
from torch import Tensor

from offspec_kernels.dequant.threads import parallel_for
from offspec_kernels.errors import ArgumentError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a stored weight, as in its checkpoint."""

    dtype: torch.dtype
    shape: Shape


@dataclass(frozen=True, slots=True)
class RowDequantizer:
    """Compiled function that dequantizes pieces of a weight's rows; see `dequant.native.compile_fill`.

    Args:
        address: Address of the function.
        arrays: Three arrays that it reads: parts of the weight, or derived from them.
        number: One more integer argument.
    """

    address: int
    arrays: tuple[Any, Any, Any]
    number: int = 0

    @property
    def pointers(self) -> tuple[int, int, int]:
        first, second, third = (part.ctypes.data for part in self.arrays)
        return first, second, third


@dataclass(frozen=True, slots=True)
class Format(ABC):
    """Storage format of a quantized weight: its tensors, and their conversion to values.

    A weight has a shape [..., rows, columns], as in a model's linear layer. by_rows: whether the first
    dimension of every part equals the weight's, so that rows can be dequantized from the same rows of the
    parts. transposed: whether values are produced as [columns, rows], and the weight is a view of them.

    `reference`, `eager` and `triton` produce the same values: equal to those of the format's own library, bit
    for bit, rounded once to the dtype of `out`. parts: on one device, checked; shape: the weight's; out:
    [rows, columns], or [columns, rows] if transposed, contiguous.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Name shown to users."""

    @property
    def by_rows(self) -> bool:
        return False

    @property
    def transposed(self) -> bool:
        return False

    @property
    def squeezable_parts(self) -> tuple[str, ...]:
        """Parts whose size-1 dimensions may be missing or added."""
        return ()

    @abstractmethod
    def parts(self, shape: Shape) -> dict[str, Part]:
        """Return the tensors of a stored weight of this shape. Raises ArgumentError if impossible."""

    @abstractmethod
    def reference(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        """Return the values, float32, computed as simply as possible; defines the result of the others."""

    def eager(self, parts: Mapping[str, Tensor], shape: Shape, out: Tensor) -> None:
        """Dequantize on the CPU, out bfloat16 or float32; by default the format's `native.fill`."""
        self._module("native").fill(self, parts, out)

    def triton(self, parts: Mapping[str, Tensor], shape: Shape, out: Tensor) -> None:
        """Dequantize on a GPU; by default `triton.fill` of the format's package."""
        self._module("triton").fill(self, parts, out)

    def fill_by_rows(self, parts: Mapping[str, Tensor], shape: Shape, out: Tensor) -> None:
        """Dequantize on the CPU with `row_dequantizer`, for an untransposed format without its own loop."""
        from offspec_kernels.dequant.native import array, fill_rows

        filler, values, columns = self.row_dequantizer(parts, shape, out.dtype), array(out), shape[-1]
        address, pointers, number = filler.address, filler.pointers, filler.number
        parallel_for(
            lambda start, end: fill_rows(address, pointers, number, columns, values, start, end),
            len(values) // columns,
            len(values),
        )

    def slice_rows(
        self, shape: Shape, start: int, end: int
    ) -> "tuple[Format, dict[str, tuple[int, int]]] | None":
        """Select elements [start, end) of the first dimension of a weight, if possible.

        Returns the format of these elements and, for each part, the needed range of its first dimension;
        omitted parts are needed whole. None: only the whole weight can be dequantized.
        """
        if not (self.by_rows and shape and shape[0]):
            return None
        each = {name: part.shape[0] // shape[0] for name, part in self.parts(shape).items()}
        return self, {name: (start * count, end * count) for name, count in each.items()}

    def rows_of_parts(
        self, parts: Mapping[str, Tensor], shape: Shape, start: int, end: int
    ) -> "tuple[Format, dict[str, Tensor]] | None":
        """Return rows [start, end) of a weight [rows, columns] in an untransposed format, and their parts.

        Parts are views, or copies smaller than the values. None: only the whole weight can be dequantized, or
        the format is transposed.
        """
        found = None if self.transposed else self.slice_rows(shape, start, end)
        if found is None:
            return None
        kind, ranges = found
        return kind, {
            name: part[slice(*ranges[name])] if name in ranges else part for name, part in parts.items()
        }

    @property
    def base_format(self) -> "Format":
        """Return a format that uses the same code: this one, without settings that differ between weights."""
        return self

    def column_multiple(self, shape: Shape) -> int:
        """Return the column granularity of pieces of a weight [rows, columns]; 0 without a dequantizer."""
        return 0

    def row_dequantizer(
        self, parts: Mapping[str, Tensor], shape: Shape, dtype: torch.dtype
    ) -> RowDequantizer:
        """Return the dequantizer for pieces of rows on the CPU, or of stored rows if transposed.

        By default `native.row_dequantizer` of the format's package. dtype: dtype of the values, bfloat16; for
        `fill_by_rows` also float32.
        """
        found: RowDequantizer = self._module("native").row_dequantizer(self, parts, shape, dtype)
        return found

    def _module(self, name: str) -> Any:
        """Import a module of the format's package; importing it loads the compiler."""
        return import_module(f"{type(self).__module__}.{name}")

    def check(self, parts: Mapping[str, Part], shape: Shape) -> None:
        """Raise ArgumentError, naming the part, unless these are the parts of a weight of this shape."""
        wanted = self.parts(shape)
        for name, part in wanted.items():
            if name not in parts:
                raise ArgumentError(name, f"missing part of a {self.name} weight")
            found = parts[name]
            alike = name in self.squeezable_parts and _without_ones(found.shape) == _without_ones(part.shape)
            if found.shape != part.shape and not alike:
                shown = f"{list(part.shape)}, not {list(found.shape)}"
                raise ArgumentError(
                    name, f"the shape for a {self.name} weight of {list(shape)} must be {shown}"
                )
            if found.dtype != part.dtype:
                raise ArgumentError(name, f"the dtype must be {part.dtype}, not {found.dtype}")
        if extra := sorted(parts.keys() - wanted.keys()):
            raise ArgumentError(extra[0], f"not a part of a {self.name} weight")


def rows_and_columns(shape: Shape) -> tuple[int, int]:
    """Return a weight's dimensions with all but the last merged into rows."""
    return prod(shape[:-1]), shape[-1]


def _without_ones(shape: Shape) -> list[int]:
    return [size for size in shape if size != 1]
