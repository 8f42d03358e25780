"""Dequantizing the blocks of a GGUF file to bfloat16 values of a state dict, a few megabytes at a time.

Notation: K key heads, and R value heads for each of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from offspec.checkpoint.gguf.header import GgmlType, GgufTensor
from offspec.core.errors import CheckpointError, UnsupportedModelError
from offspec.core.files import as_read_error

if TYPE_CHECKING:
    import numpy as np
    import torch

    Array = np.ndarray[Any, np.dtype[Any]]

PIECE = 4 * 2**20  # values at a time: 16 MiB as float32, and a few times that while they are dequantized

Step = Literal["as it is", "unpermute", "minus one", "log of minus", "alternate"]


class RowRun(NamedTuple):
    """Consecutive rows of one source that are also consecutive in the weight."""

    source: int
    start: int
    rows: int


class ExpertStack(NamedTuple):
    """Layout of a weight with one matrix per expert.

    Args:
        alternate: Rows are taken from each source in turn.
        transposed: Rows and columns are exchanged.
    """

    alternate: bool = False
    transposed: bool = False


class RowOrder(NamedTuple):
    """Order of a weight's rows and columns, if it differs from that of a single source.

    Args:
        runs: Runs of rows, in the weight's order.
        tiles: (A, B, size): columns are stored as A times B pieces of a size, and reordered to B times A. All
            values of a vector are columns.
        stack: How each expert's matrix is made from the sources.
    """

    runs: tuple[RowRun, ...] = ()
    tiles: tuple[int, int, int] | None = None
    stack: ExpertStack | None = None


IDENTITY_ORDER = RowOrder()


@dataclass(frozen=True, slots=True)
class GgufRecipe:
    """Recipe for one tensor of the state dict.

    Args:
        name: Name in the state dict.
        shape: Shape in the state dict.
        sources: Tensors of the GGUF file.
        step: Operation in addition to dequantizing. "unpermute" undoes llama.cpp's row order of query and key
            weights; "minus one" undoes the 1 that it adds to some norms; "log of minus" undoes its transform
            of log decays; "alternate" interleaves values of the sources.
        heads: Number of heads to unpermute.
        order: Order of rows and columns.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[GgufTensor, ...]
    step: Step = "as it is"
    heads: int = 1
    order: RowOrder = IDENTITY_ORDER

    @property
    def nbytes(self) -> int:
        """Bytes as bfloat16."""
        return 2 * math.prod(self.shape)


def order_of(config: Any, name: str, sources: list[GgufTensor], *, tiled: bool, transposed: bool) -> RowOrder:
    """Return the row order of a weight in its sources. tiled, transposed: as in `GgufArchitecture`."""
    if name.endswith(".linear_attn.in_proj_qkvz.weight") and len(sources) == 2:
        return RowOrder(_by_key_head(config))
    if transposed and name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
        return RowOrder(stack=ExpertStack(alternate=len(sources) > 1, transposed=True))
    if len(sources) > 1 and all(len(source.shape) == 3 for source in sources):
        return RowOrder(stack=ExpertStack())
    if len(sources) > 1:
        return RowOrder(tuple(RowRun(i, 0, source.shape[0]) for i, source in enumerate(sources)))
    if tiled and ".linear_attn." in name:
        return _tiled(config, name.rpartition(".linear_attn.")[2])
    return IDENTITY_ORDER


def _by_key_head(config: Any) -> tuple[RowRun, ...]:
    """Return the rows by key head: its queries, keys and values (of source 1) and gate (of source 0)."""
    heads, size = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // heads * config.linear_value_head_dim
    runs = []
    for head in range(heads):
        runs += [RowRun(1, head * size, size), RowRun(1, (heads + head) * size, size)]
        runs += [RowRun(1, 2 * heads * size + head * values, values), RowRun(0, head * values, values)]
    return tuple(runs)


def _tiled(config: Any, part: str) -> RowOrder:
    """Return the order that turns value heads stored as R repetitions of all K into K times R."""
    keys, size = config.linear_num_key_heads, config.linear_value_head_dim
    each = config.linear_num_value_heads // keys
    if each == 1:
        return IDENTITY_ORDER
    if part in ("A_log", "dt_bias"):
        return RowOrder(tiles=(each, keys, 1))
    if part == "out_proj.weight":
        return RowOrder(tiles=(each, keys, size))
    before = 0
    if part in ("in_proj_a.weight", "in_proj_b.weight"):
        size = 1
    elif part in ("in_proj_qkv.weight", "conv1d.weight"):
        before = 2 * keys * config.linear_key_head_dim
    elif part != "in_proj_z.weight":
        return IDENTITY_ORDER
    heads = [RowRun(0, before + (i * keys + key) * size, size) for key in range(keys) for i in range(each)]
    return RowOrder((RowRun(0, 0, before), *heads) if before else tuple(heads))


def check_types(path: Path, recipes: list[GgufRecipe]) -> None:
    """Raise UnsupportedModelError unless every type in use can be dequantized."""
    import numpy as np

    kinds = {source.kind.id: source.kind for recipe in recipes for source in recipe.sources}
    for kind in kinds.values():
        try:
            _dequantize(np.zeros((1, kind.block_bytes), np.uint8), kind)
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"{path} holds tensors of type {kind.name}, which cannot be dequantized: "
                "choose a file of another type, such as Q8_0 or Q4_K_M"
            ) from error


def values(recipe: GgufRecipe) -> Iterator[torch.Tensor]:
    """Yield the tensor as consecutive pieces, float32 on the CPU, in row-major order.

    Raises CheckpointError if the file cannot be read.
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
    """Yield float32 rows of the sources in the order of the recipe."""
    import numpy as np

    first = recipe.sources[0]
    if recipe.step == "unpermute" and len(first.shape) == 1:  # a bias: one value per row of its weight
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
        for run in recipe.order.runs or [RowRun(0, 0, _row_count(first))]:
            for piece in _rows(recipe.sources[run.source], run.start, run.rows):
                yield piece if recipe.order.tiles is None else _untiled(piece, recipe.order.tiles)


def _experts(sources: tuple[GgufTensor, ...], stack: ExpertStack) -> Iterator[Array]:
    import numpy as np

    for expert in range(sources[0].shape[0]):
        parts = [read_rows(each, expert * each.shape[1], each.shape[1]) for each in sources]
        made = np.stack(parts, 1).reshape(-1, parts[0].shape[1]) if stack.alternate else np.vstack(parts)
        yield np.ascontiguousarray(made.T if stack.transposed else made)


def _row_count(source: GgufTensor) -> int:
    return math.prod(source.shape[:-1])


def _unpermuted(rows: Array, heads: int) -> Array:
    """Return [heads * D, W] with the halves of each head contiguous instead of alternating by row."""
    import numpy as np

    pairs = rows.reshape(heads, -1, 2, rows.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _untiled(rows: Array, tiles: tuple[int, int, int]) -> Array:
    """Reorder [n, A * B * size] to [n, B * A * size]; a vector may be passed as rows of one value."""
    import numpy as np

    return np.ascontiguousarray(rows.reshape(-1, *tiles).swapaxes(1, 2)).reshape(rows.shape)


def _rows(source: GgufTensor, start: int, count: int) -> Iterator[Array]:
    step = max(1, PIECE // max(1, source.shape[-1] if source.shape else 1))
    for first in range(start, start + count, step):
        yield read_rows(source, first, min(step, start + count - first))


def read_rows(source: GgufTensor, start: int, count: int) -> Array:
    """Return rows of a tensor as float32, [count, row]. Raises CheckpointError if the file cannot be read."""
    import numpy as np

    row_bytes = source.nbytes // max(1, _row_count(source))
    with as_read_error(source.file):
        raw = np.fromfile(source.file, np.uint8, count * row_bytes, offset=source.offset + start * row_bytes)
    if raw.size != count * row_bytes:
        raise CheckpointError(f"{source.file} changed while it was read: open it again")
    return _dequantize(raw.reshape(count, row_bytes), source.kind)


def _dequantize(raw: Array, kind: GgmlType) -> Array:
    """Dequantize [rows, bytes] to float32 [rows, values]. NotImplementedError if gguf lacks the type."""
    import gguf
    import numpy as np

    try:
        number = gguf.GGMLQuantizationType(kind.id)
    except ValueError as error:  # the gguf package is older than the type
        raise NotImplementedError from error
    return np.asarray(gguf.dequantize(raw, number), dtype=np.float32)
