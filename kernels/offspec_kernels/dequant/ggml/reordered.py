"""Weights with rows and columns in another order in a GGUF file, or spread over several tensors."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offspec_kernels.dequant.format import Format, Part, RowDequantizer, Shape
from offspec_kernels.dequant.ggml import FLOATS, Ggml
from offspec_kernels.errors import ArgumentError

_ROWS = 1024  # rows whose columns are reordered together
Run = tuple[int, int, int]
Tiles = tuple[int, int, int]
_Fill = Callable[[Ggml, Mapping[str, Tensor], Shape, Tensor], None]  # Ggml.eager or Ggml.triton


class _Tensors(Format):
    """Weight in GGUF tensors: parts blocks0, blocks1, … uint8 [..., rows of the tensor, bytes of a row]."""

    __slots__ = ()
    kinds: tuple[str, ...]
    rows: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.kinds) != len(self.rows):
            raise ArgumentError("rows", f"must be one for each of {len(self.kinds)} tensors")

    @property
    def name(self) -> str:
        return "+".join(dict.fromkeys(self.kinds))

    def _parts(self, lead: Shape, columns: int) -> dict[str, Part]:
        """Return the parts of tensors [*lead, rows, columns]."""
        every = enumerate(zip(self.kinds, self.rows, strict=True))
        return {f"blocks{i}": Ggml(kind).parts((*lead, rows, columns))["blocks"] for i, (kind, rows) in every}

    def _values(self, parts: Mapping[str, Tensor], lead: Shape, columns: int) -> list[Tensor]:
        """Return the reference values of each tensor [*lead, rows, columns]."""
        return [
            Ggml(kind).reference({"blocks": parts[f"blocks{i}"]}, (*lead, rows, columns))
            for i, (kind, rows) in enumerate(zip(self.kinds, self.rows, strict=True))
        ]

    @abstractmethod
    def _fill(self, parts: Mapping[str, Tensor], out: Tensor, fill: _Fill) -> None:
        """Fill out with `fill` of the tensors' kinds."""

    def eager(self, parts: Mapping[str, Tensor], shape: Shape, out: Tensor) -> None:
        self._fill(parts, out, Ggml.eager)

    def triton(self, parts: Mapping[str, Tensor], shape: Shape, out: Tensor) -> None:
        self._fill(parts, out, Ggml.triton)


@dataclass(frozen=True, slots=True)
class ReorderedGgml(_Tensors):
    """Weight [rows, columns] in several GGUF tensors, each with some of the rows and all columns.

    Parts: blocks0, blocks1, … uint8 [rows of the tensor, bytes of a row].

    kinds, rows: kind and row count of each tensor. runs (tensor, start, count): the weight's rows in order.
    tiles (A, B, size): columns are stored as A times B pieces of `size` and needed as B times A; None: stored
    order.
    """

    kinds: tuple[str, ...]
    rows: tuple[int, ...]
    runs: tuple[Run, ...]
    tiles: Tiles | None = None

    def __post_init__(self) -> None:
        _Tensors.__post_init__(self)
        for source, start, count in self.runs:
            if not (0 <= source < len(self.rows) and 0 <= start <= start + count <= self.rows[source]):
                raise ArgumentError("runs", f"{(source, start, count)} is out of range for {list(self.rows)}")

    @property
    def base_format(self) -> Format:
        return ReorderedGgml(self.kinds, (0,) * len(self.kinds), ())

    def parts(self, shape: Shape) -> dict[str, Part]:
        if len(shape) != 2 or shape[0] != sum(run[2] for run in self.runs):
            raise ArgumentError("shape", f"{list(shape)} does not match the rows of its runs")
        if self.tiles is not None and shape[1] != self.tiles[0] * self.tiles[1] * self.tiles[2]:
            raise ArgumentError("shape", f"{list(shape)} does not match the columns of tiles {self.tiles}")
        return self._parts((), shape[1])

    def reference(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        found = self._values(parts, (), shape[1])
        values = torch.cat([found[source][start : start + count] for source, start, count in self.runs])
        if self.tiles is None:
            return values
        columns: Tensor = values.unflatten(1, self.tiles)
        return columns.transpose(1, 2).flatten(1)

    def eager(self, parts: Mapping[str, Tensor], shape: Shape, out: Tensor) -> None:
        if self.column_multiple(shape):
            self.fill_by_rows(parts, shape, out)
        elif len(self.kinds) == 1 and self.kinds[0] not in FLOATS and self.tiles is not None:
            from offspec_kernels.dequant.ggml import native

            native.fill_tiled(self.kinds[0], _order(self.runs), self.tiles, parts["blocks0"], out)
        else:
            _Tensors.eager(self, parts, shape, out)

    def column_multiple(self, shape: Shape) -> int:
        return (
            Ggml(self.kinds[0]).column_multiple(shape) if len(self.kinds) == 1 and self.tiles is None else 0
        )

    def row_dequantizer(
        self, parts: Mapping[str, Tensor], shape: Shape, dtype: torch.dtype
    ) -> RowDequantizer:
        from offspec_kernels.dequant.ggml import native

        return native.ordered_filler(self.kinds[0], _order(self.runs), parts["blocks0"], dtype)

    def _fill(self, parts: Mapping[str, Tensor], out: Tensor, fill: _Fill) -> None:
        if len(self.kinds) == 1:
            self._fill_rows(0, self._gathered(parts["blocks0"]), out, fill)
            return
        place = 0
        for source, start, count in self.runs:
            blocks = parts[f"blocks{source}"][start : start + count]
            self._fill_rows(source, blocks, out[place : place + count], fill)
            place += count

    def _gathered(self, blocks: Tensor) -> Tensor:
        """Reorder the rows of a single tensor as bytes, which are fewer than values."""
        if self.runs == ((0, 0, self.rows[0]),):
            return blocks
        return torch.cat([blocks[start : start + count] for _, start, count in self.runs])

    def _fill_rows(self, source: int, blocks: Tensor, out: Tensor, fill: _Fill) -> None:
        kind = Ggml(self.kinds[source])
        if self.tiles is None:
            fill(kind, {"blocks": blocks}, tuple(out.shape), out)
            return
        scratch = torch.empty_like(out[:_ROWS])
        for start in range(0, len(out), _ROWS):
            to = out[start : start + _ROWS]
            values = scratch[: len(to)]
            fill(kind, {"blocks": blocks[start : start + _ROWS]}, tuple(values.shape), values)
            first, second, size = self.tiles
            to.unflatten(1, (second, first, size)).copy_(values.unflatten(1, self.tiles).transpose(1, 2))


@lru_cache(maxsize=16)  # a model has few different orders in all its layers
def _order(runs: tuple[Run, ...]) -> NDArray[np.int64]:
    """Return the row of the single tensor for each row of the weight."""
    return np.concatenate([np.arange(start, start + count) for _, start, count in runs])


@dataclass(frozen=True, slots=True)
class StackedGgml(_Tensors):
    """Weight [E, R, C], or [E, C, R] if turned, in several tensors with columns C.

    Parts: blocks0, blocks1, … uint8 [E, rows of the tensor, bytes of a row].

    kinds, rows: kind and row count of each tensor. alternate: whether a matrix takes one row of each tensor
    in turn, not all rows of the first tensor first.
    """

    kinds: tuple[str, ...]
    rows: tuple[int, ...]
    alternate: bool = False
    turned: bool = False

    def __post_init__(self) -> None:
        _Tensors.__post_init__(self)
        if self.alternate and len(set(self.rows)) > 1:
            raise ArgumentError("rows", f"cannot alternate with rows {list(self.rows)}")

    @property
    def transposed(self) -> bool:
        return self.turned

    def parts(self, shape: Shape) -> dict[str, Part]:
        if len(shape) != 3:
            raise ArgumentError(
                "shape", f"must have three dimensions (a stack of matrices), not {list(shape)}"
            )
        rows, columns = reversed(shape[1:]) if self.turned else shape[1:]
        if rows != sum(self.rows):
            raise ArgumentError("shape", f"{list(shape)} does not match {list(self.rows)} rows")
        return self._parts(shape[:1], columns)

    def slice_rows(
        self, shape: Shape, start: int, end: int
    ) -> tuple[Format, dict[str, tuple[int, int]]] | None:
        return self, {f"blocks{i}": (start, end) for i in range(len(self.kinds))}

    def reference(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        found = self._values(parts, shape[:1], shape[1] if self.turned else shape[2])
        values = torch.stack(found, 2).flatten(1, 2) if self.alternate else torch.cat(found, 1)
        return values.mT if self.turned else values

    def _fill(self, parts: Mapping[str, Tensor], out: Tensor, fill: _Fill) -> None:
        """Fill out: [E, R, C]."""
        if len(self.kinds) == 1:
            fill(Ggml(self.kinds[0]), {"blocks": parts["blocks0"]}, tuple(out.shape), out)
            return
        scratch = out.new_empty(self.rows[0], out.shape[2]) if self.alternate else None
        for element, values in enumerate(out):
            place = 0
            for i, (kind, rows) in enumerate(zip(self.kinds, self.rows, strict=True)):
                to = values[place : place + rows] if scratch is None else scratch
                fill(Ggml(kind), {"blocks": parts[f"blocks{i}"][element]}, tuple(to.shape), to)
                place += rows
                if scratch is not None:
                    values[i :: len(self.kinds)].copy_(scratch)
