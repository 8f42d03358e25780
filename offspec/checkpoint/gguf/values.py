"""From the blocks of a GGUF file to the bfloat16 values of a state dict, a few megabytes at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from offspec.checkpoint.gguf.header import GgufTensor
from offspec.checkpoint.gguf.order import AS_IT_IS, Order, Run, Stack
from offspec.checkpoint.gguf.types import GgmlType
from offspec.core.errors import CheckpointError, UnsupportedModelError
from offspec.core.files import reading

if TYPE_CHECKING:
    import numpy as np
    import torch

    Array = np.ndarray[Any, np.dtype[Any]]

PIECE = 4 * 2**20  # values at a time: 16 MiB as float32, and a few times that while they are computed

Step = Literal["as it is", "unpermute", "minus one", "log of minus", "alternate"]


@dataclass(frozen=True, slots=True)
class GgufRecipe:
    """How one tensor of the state dict is made.

    name, shape: as in the state dict. sources: tensors of the GGUF file. step: what is done besides
    unpacking: "unpermute" undoes the order of rows that llama.cpp gives query and key weights of `heads`
    heads; "minus one" undoes the one that it adds to some norms; "log of minus" undoes what it makes of the
    logarithms of decays; "alternate" takes a number of each source in turn. order: in which rows and columns
    are wanted.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[GgufTensor, ...]
    step: Step = "as it is"
    heads: int = 1
    order: Order = AS_IT_IS

    @property
    def nbytes(self) -> int:
        """Bytes as bfloat16."""
        return 2 * math.prod(self.shape)


def check_types(path: Path, recipes: list[GgufRecipe]) -> None:
    """Raise UnsupportedModelError unless every type in use can be unpacked."""
    import numpy as np

    kinds = {source.kind.id: source.kind for recipe in recipes for source in recipe.sources}
    for kind in kinds.values():
        try:
            _dequantize(np.zeros((1, kind.block_bytes), np.uint8), kind)
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"{path} holds tensors of type {kind.name}, which cannot be unpacked: "
                "choose a file of another type, such as Q8_0 or Q4_K_M"
            ) from error


def values(recipe: GgufRecipe) -> Iterator[torch.Tensor]:
    """The tensor as consecutive pieces, float32 on the CPU, in row-major order.

    Raises CheckpointError when the file cannot be read.
    """
    import numpy as np
    import torch

    for piece in _pieces(recipe):
        if recipe.step == "minus one":
            piece = piece - piece.dtype.type(1)
        elif recipe.step == "log of minus":
            piece = np.log(-piece)
        yield torch.from_numpy(piece)


def _pieces(recipe: GgufRecipe) -> Iterator[Array]:
    """float32 rows of the sources in the order that the recipe asks for."""
    import numpy as np

    first = recipe.sources[0]
    if recipe.step == "unpermute" and len(first.shape) == 1:  # a bias: one value for each row of its weight
        yield _unpermuted(read_rows(first, 0, 1).reshape(-1, 1), recipe.heads)
    elif recipe.step == "unpermute":
        rows = first.shape[0] // recipe.heads
        for head in range(recipe.heads):
            yield _unpermuted(read_rows(first, head * rows, rows), 1)
    elif recipe.order.stack is not None:
        yield from _experts(recipe.sources, recipe.order.stack)
    elif recipe.step == "alternate":
        both = [read_rows(source, 0, _row_count(source)) for source in recipe.sources]
        yield np.stack(both, -1).reshape(len(both[0]), -1)
    else:
        for run in recipe.order.runs or [Run(0, 0, _row_count(first))]:
            for piece in _rows(recipe.sources[run.source], run.start, run.rows):
                yield piece if recipe.order.tiles is None else _untiled(piece, recipe.order.tiles)


def _experts(sources: tuple[GgufTensor, ...], stack: Stack) -> Iterator[Array]:
    """One matrix after the other."""
    import numpy as np

    for expert in range(sources[0].shape[0]):
        parts = [read_rows(each, expert * each.shape[1], each.shape[1]) for each in sources]
        made = np.stack(parts, 1).reshape(-1, parts[0].shape[1]) if stack.alternate else np.vstack(parts)
        yield np.ascontiguousarray(made.T if stack.turned else made)


def _row_count(source: GgufTensor) -> int:
    return math.prod(source.shape[:-1])


def _unpermuted(rows: Array, heads: int) -> Array:
    """[heads * D, W] whose rows alternate between the halves of a head, as one half after the other."""
    import numpy as np

    pairs = rows.reshape(heads, -1, 2, rows.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _untiled(rows: Array, tiles: tuple[int, int, int]) -> Array:
    """[n, A * B * size] to [n, B * A * size]; a vector may come as rows of one value."""
    import numpy as np

    return np.ascontiguousarray(rows.reshape(-1, *tiles).swapaxes(1, 2)).reshape(rows.shape)


def _rows(source: GgufTensor, start: int, count: int) -> Iterator[Array]:
    """`count` rows from row `start` on, in pieces."""
    step = max(1, PIECE // max(1, source.shape[-1] if source.shape else 1))
    for first in range(start, start + count, step):
        yield read_rows(source, first, min(step, start + count - first))


def read_rows(source: GgufTensor, start: int, count: int) -> Array:
    """Rows of a tensor as float32, [count, row]. Raises CheckpointError when the file cannot be read."""
    import numpy as np

    row_bytes = source.nbytes // max(1, _row_count(source))
    with reading(source.file):
        raw = np.fromfile(source.file, np.uint8, count * row_bytes, offset=source.offset + start * row_bytes)
    if raw.size != count * row_bytes:
        raise CheckpointError(f"{source.file} changed while it was read: open it again")
    return _dequantize(raw.reshape(count, row_bytes), source.kind)


def _dequantize(raw: Array, kind: GgmlType) -> Array:
    """[rows, bytes] to float32 [rows, values]. NotImplementedError for a type that gguf cannot unpack."""
    import gguf
    import numpy as np

    try:
        number = gguf.GGMLQuantizationType(kind.id)
    except ValueError as error:  # a gguf package that is older than the type
        raise NotImplementedError from error
    return np.asarray(gguf.dequantize(raw, number), dtype=np.float32)
