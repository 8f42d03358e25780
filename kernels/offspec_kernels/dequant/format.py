"""What every stored format of a weight has in common."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from math import prod
from typing import Any

import torch
from torch import Tensor

from offspec_kernels.dequant.threads import spread
from offspec_kernels.errors import ArgumentError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a stored weight, as its checkpoint has it."""

    dtype: torch.dtype
    shape: Shape


@dataclass(frozen=True, slots=True)
class Filler:
    """What compiled loops make pieces of a weight's rows with; see `dequant.native.filling`.

    Args:
        address: Of the function.
        arrays: Three of the weight's parts, or of what was made of them, which it reads.
        number: It is given besides.
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
    """How a weight is stored in fewer bits: which tensors it is made of, and how to make values of them.

    A weight has a shape [..., rows, columns], as a model's linear layer has it. by_rows: the first dimension
    of every part is that of the weight, so that some of its rows can be had from the same rows of the parts.
    transposed: values are made as [columns, rows], and the weight is a view of that.

    The three makers write the same values, those of the format's own library to the last bit, rounded once to
    the dtype of `out`. parts: on one device, checked; shape: the weight's; out: [rows, columns], or
    [columns, rows] where transposed, contiguous.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """What people call it."""

    @property
    def by_rows(self) -> bool:
        return False

    @property
    def transposed(self) -> bool:
        return False

    @property
    def loose(self) -> tuple[str, ...]:
        """Parts of which dimensions of 1 may be missing, or be there besides."""
        return ()

    @abstractmethod
    def parts(self, shape: Shape) -> dict[str, Part]:
        """The tensors that a weight of this shape is stored in. Raises ArgumentError where it cannot be."""

    @abstractmethod
    def reference(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        """The values, float32, by the shortest way to say it; the truth for the others."""

    def eager(self, parts: Mapping[str, Tensor], shape: Shape, out: Tensor) -> None:
        """On the CPU, out bfloat16 or float32; by default `native.fill` of the format's package."""
        self._module("native").fill(self, parts, out)

    def triton(self, parts: Mapping[str, Tensor], shape: Shape, out: Tensor) -> None:
        """On a GPU; by default `triton.fill` of the format's package."""
        self._module("triton").fill(self, parts, out)

    def fill_by_rows(self, parts: Mapping[str, Tensor], shape: Shape, out: Tensor) -> None:
        """On the CPU, by `filler` of a format that is not transposed: in place of a loop of its own."""
        from offspec_kernels.dequant.native import array, fill_rows

        filler, values, columns = self.filler(parts, shape, out.dtype), array(out), shape[-1]
        address, pointers, number = filler.address, filler.pointers, filler.number
        spread(
            lambda start, end: fill_rows(address, pointers, number, columns, values, start, end),
            len(values) // columns,
            len(values),
        )

    def cut(self, shape: Shape, start: int, end: int) -> "tuple[Format, dict[str, tuple[int, int]]] | None":
        """Elements [start, end) of the first dimension of a weight, where they can be had alone.

        The format that they are in, and of each part the range of its first dimension that they are made of;
        a part that is left out is needed whole. None: only the whole weight can be unpacked.
        """
        if not (self.by_rows and shape and shape[0]):
            return None
        each = {name: part.shape[0] // shape[0] for name, part in self.parts(shape).items()}
        return self, {name: (start * count, end * count) for name, count in each.items()}

    def some_rows(
        self, parts: Mapping[str, Tensor], shape: Shape, start: int, end: int
    ) -> "tuple[Format, dict[str, Tensor]] | None":
        """Rows [start, end) of a weight [rows, columns] in a format that is not transposed, and their parts.

        Views, or copies that are small beside the values. None: only the whole weight can be unpacked, or
        none of it as it is to be.
        """
        found = None if self.transposed else self.cut(shape, start, end)
        if found is None:
            return None
        kind, ranges = found
        return kind, {
            name: part[slice(*ranges[name])] if name in ranges else part for name, part in parts.items()
        }

    @property
    def kin(self) -> "Format":
        """A format that the same code unpacks: itself, without what differs from weight to weight."""
        return self

    def fill_step(self, shape: Shape) -> int:
        """Columns of which pieces of a weight [rows, columns] have a multiple; 0 without a `filler`."""
        return 0

    def filler(self, parts: Mapping[str, Tensor], shape: Shape, dtype: torch.dtype) -> Filler:
        """What makes pieces of rows on the CPU, or of stored rows where the format is transposed.

        By default `native.filler` of the format's package. dtype: of the values, bfloat16; for `fill_by_rows`
        float32, too.
        """
        found: Filler = self._module("native").filler(self, parts, shape, dtype)
        return found

    def _module(self, name: str) -> Any:
        """A module of the format's package, which loads what compiles loops."""
        return import_module(f"{type(self).__module__}.{name}")

    def check(self, parts: Mapping[str, Part], shape: Shape) -> None:
        """Raise ArgumentError, naming the part, unless these are the parts of a weight of this shape."""
        wanted = self.parts(shape)
        for name, part in wanted.items():
            if name not in parts:
                raise ArgumentError(name, f"a {self.name} weight needs it")
            found = parts[name]
            alike = name in self.loose and _without_ones(found.shape) == _without_ones(part.shape)
            if found.shape != part.shape and not alike:
                shown = f"{list(part.shape)}, not {list(found.shape)}"
                raise ArgumentError(
                    name, f"the shape for a {self.name} weight of {list(shape)} must be {shown}"
                )
            if found.dtype != part.dtype:
                raise ArgumentError(name, f"the dtype must be {part.dtype}, not {found.dtype}")
        if extra := sorted(parts.keys() - wanted.keys()):
            raise ArgumentError(extra[0], f"a {self.name} weight has no such part")


def rows_and_columns(shape: Shape) -> tuple[int, int]:
    """A weight's dimensions with all but the last as rows."""
    return prod(shape[:-1]), shape[-1]


def _without_ones(shape: Shape) -> list[int]:
    return [size for size in shape if size != 1]
