"""Stacks of matrices, as the experts of a layer are, that lie in another order or in several GGUF tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from offspec_kernels.dequant.format import Format, Part, Shape
from offspec_kernels.dequant.ggml import Ggml
from offspec_kernels.errors import ArgumentError

_Fill = Callable[[Ggml, Tensor, Tensor], None]  # a tensor's kind, some of its rows, and where their values go


@dataclass(frozen=True, slots=True)
class Stacked(Format):
    """A weight [E, R, C], or [E, C, R] where turned, of some tensors with columns C.

    Parts: blocks0, blocks1, … uint8 [E, rows of the tensor, bytes of a row].

    kinds, rows: of the tensors. alternate: the rows of a matrix are one of each tensor in turn; else those of
    the first come first.
    """

    kinds: tuple[str, ...]
    rows: tuple[int, ...]
    alternate: bool = False
    turned: bool = False

    def __post_init__(self) -> None:
        if len(self.kinds) != len(self.rows):
            raise ArgumentError("rows", f"must be one for each of {len(self.kinds)} tensors")
        if self.alternate and len(set(self.rows)) > 1:
            raise ArgumentError("rows", f"cannot alternate where there are {list(self.rows)}")

    @property
    def name(self) -> str:
        return "+".join(dict.fromkeys(self.kinds))

    @property
    def transposed(self) -> bool:
        return self.turned

    def parts(self, shape: Shape) -> dict[str, Part]:
        if len(shape) != 3:
            raise ArgumentError("shape", f"must be that of a stack of matrices, not {list(shape)}")
        rows, columns = reversed(shape[1:]) if self.turned else shape[1:]
        if rows != sum(self.rows):
            raise ArgumentError("shape", f"{list(shape)} does not have {list(self.rows)} rows")
        return {
            f"blocks{i}": Ggml(kind).parts((shape[0], each, columns))["blocks"]
            for i, (kind, each) in enumerate(zip(self.kinds, self.rows, strict=True))
        }

    def cut(self, shape: Shape, start: int, end: int) -> tuple[Format, dict[str, tuple[int, int]]] | None:
        return self, {f"blocks{i}": (start, end) for i in range(len(self.kinds))}

    def reference(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        columns = shape[1] if self.turned else shape[2]
        found = [
            Ggml(kind).reference({"blocks": parts[f"blocks{i}"]}, (shape[0], each, columns))
            for i, (kind, each) in enumerate(zip(self.kinds, self.rows, strict=True))
        ]
        values = torch.stack(found, 2).flatten(1, 2) if self.alternate else torch.cat(found, 1)
        return values.mT if self.turned else values

    def eager(self, parts: Mapping[str, Tensor], shape: Shape, out: Tensor) -> None:
        self._fill(parts, out, lambda kind, some, to: kind.eager({"blocks": some}, tuple(to.shape), to))

    def triton(self, parts: Mapping[str, Tensor], shape: Shape, out: Tensor) -> None:
        self._fill(parts, out, lambda kind, some, to: kind.triton({"blocks": some}, tuple(to.shape), to))

    def _fill(self, parts: Mapping[str, Tensor], out: Tensor, fill: _Fill) -> None:
        """out: [E, R, C]."""
        if len(self.kinds) == 1:
            fill(Ggml(self.kinds[0]), parts["blocks0"], out)
            return
        scratch = out.new_empty(self.rows[0], out.shape[2]) if self.alternate else None
        for element, values in enumerate(out):
            place = 0
            for i, (kind, rows) in enumerate(zip(self.kinds, self.rows, strict=True)):
                some = parts[f"blocks{i}"][element]
                if scratch is None:
                    fill(Ggml(kind), some, values[place : place + rows])
                    place += rows
                else:
                    fill(Ggml(kind), some, scratch)
                    values[i :: len(self.kinds)].copy_(scratch)
