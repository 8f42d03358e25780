"""Weights whose rows and columns lie in another order in a GGUF file, or in several of its tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offspec_kernels.dequant.format import Filler, Format, Part, Shape
from offspec_kernels.dequant.ggml import FLOATS, Ggml
from offspec_kernels.errors import ArgumentError

_ROWS = 1024  # whose columns are put in order together
Run = tuple[int, int, int]
Tiles = tuple[int, int, int]
_Fill = Callable[[int, Tensor, Tensor], None]  # which tensor, rows of its bytes, and where their values go


@dataclass(frozen=True, slots=True)
class Reordered(Format):
    """A weight [rows, columns] of some GGUF tensors, each with a number of rows and all with its columns.

    Parts: blocks0, blocks1, … uint8 [rows of the tensor, bytes of a row].

    kinds, rows: of the tensors. runs (tensor, start, count): the weight's rows in their order. tiles
    (A, B, size): columns that lie as A times B pieces of a size and are wanted as B times A; None: as they
    lie.
    """

    kinds: tuple[str, ...]
    rows: tuple[int, ...]
    runs: tuple[Run, ...]
    tiles: Tiles | None = None

    def __post_init__(self) -> None:
        if len(self.kinds) != len(self.rows):
            raise ArgumentError("rows", f"must be one for each of {len(self.kinds)} tensors")
        for source, start, count in self.runs:
            if not (0 <= source < len(self.rows) and 0 <= start <= start + count <= self.rows[source]):
                raise ArgumentError("runs", f"{(source, start, count)} is outside of {list(self.rows)}")

    @property
    def name(self) -> str:
        return "+".join(dict.fromkeys(self.kinds))

    @property
    def kin(self) -> Format:
        return Reordered(self.kinds, (0,) * len(self.kinds), ())

    def parts(self, shape: Shape) -> dict[str, Part]:
        if len(shape) != 2 or shape[0] != sum(run[2] for run in self.runs):
            raise ArgumentError("shape", f"{list(shape)} does not have the rows of its runs")
        if self.tiles is not None and shape[1] != self.tiles[0] * self.tiles[1] * self.tiles[2]:
            raise ArgumentError("shape", f"{list(shape)} does not have the columns of {self.tiles}")
        return {
            f"blocks{i}": Ggml(kind).parts((rows, shape[1]))["blocks"]
            for i, (kind, rows) in enumerate(zip(self.kinds, self.rows, strict=True))
        }

    def reference(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        found = [
            Ggml(kind).reference({"blocks": parts[f"blocks{i}"]}, (rows, shape[1]))
            for i, (kind, rows) in enumerate(zip(self.kinds, self.rows, strict=True))
        ]
        values = torch.cat([found[source][start : start + count] for source, start, count in self.runs])
        if self.tiles is None:
            return values
        columns: Tensor = values.unflatten(1, self.tiles)
        return columns.transpose(1, 2).flatten(1)

    def eager(self, parts: Mapping[str, Tensor], shape: Shape, out: Tensor) -> None:
        if self.fill_step(shape):
            self.fill_by_rows(parts, shape, out)
            return
        if len(self.kinds) == 1 and self.kinds[0] not in FLOATS and self.tiles is not None:
            from offspec_kernels.dequant.ggml import native

            native.fill_tiled(self.kinds[0], _order(self.runs), self.tiles, parts["blocks0"], out)
            return
        kinds = [Ggml(kind) for kind in self.kinds]
        self._fill(parts, out, lambda i, blocks, to: kinds[i].eager({"blocks": blocks}, tuple(to.shape), to))

    def fill_step(self, shape: Shape) -> int:
        return Ggml(self.kinds[0]).fill_step(shape) if len(self.kinds) == 1 and self.tiles is None else 0

    def filler(self, parts: Mapping[str, Tensor], shape: Shape, dtype: torch.dtype) -> Filler:
        from offspec_kernels.dequant.ggml import native

        return native.ordered_filler(self.kinds[0], _order(self.runs), parts["blocks0"], dtype)

    def triton(self, parts: Mapping[str, Tensor], shape: Shape, out: Tensor) -> None:
        kinds = [Ggml(kind) for kind in self.kinds]
        self._fill(parts, out, lambda i, blocks, to: kinds[i].triton({"blocks": blocks}, tuple(to.shape), to))

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
        """Rows of the one tensor in their order: bytes, which are fewer than values."""
        if self.runs == ((0, 0, self.rows[0]),):
            return blocks
        return torch.cat([blocks[start : start + count] for _, start, count in self.runs])

    def _fill_rows(self, source: int, blocks: Tensor, out: Tensor, fill: _Fill) -> None:
        if self.tiles is None:
            fill(source, blocks, out)
            return
        scratch = torch.empty_like(out[:_ROWS])
        for start in range(0, len(out), _ROWS):
            to = out[start : start + _ROWS]
            values = scratch[: len(to)]
            fill(source, blocks[start : start + _ROWS], values)
            first, second, size = self.tiles
            to.unflatten(1, (second, first, size)).copy_(values.unflatten(1, self.tiles).transpose(1, 2))


@lru_cache(maxsize=16)  # a model has few of them, for all of its layers
def _order(runs: tuple[Run, ...]) -> NDArray[np.int64]:
    """Which row of the one tensor each row is."""
    return np.concatenate([np.arange(start, start + count) for _, start, count in runs])
