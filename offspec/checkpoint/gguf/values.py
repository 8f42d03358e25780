"""From the blocks of a GGUF file to the bfloat16 values of a state dict, a few megabytes at a time.

Letters: K heads of keys, R heads of values for each of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from offspec.checkpoint.gguf.header import GgmlType, GgufTensor
from offspec.core.errors import CheckpointError, UnsupportedModelError
from offspec.core.files import reading

if TYPE_CHECKING:
    import numpy as np
    import torch

    Array = np.ndarray[Any, np.dtype[Any]]

PIECE = 4 * 2**20  # values at a time: 16 MiB as float32, and a few times that while they are computed

Step = Literal["as it is", "unpermute", "minus one", "log of minus", "alternate"]


class Run(NamedTuple):
    """Rows of one source that follow each other in the weight too."""

    source: int
    start: int
    rows: int


class Stack(NamedTuple):
    """A weight of one matrix for each expert. alternate: its rows are one of each source in turn; turned: it
    has rows and columns exchanged.
    """

    alternate: bool = False
    turned: bool = False


class Order(NamedTuple):
    """A weight's rows, run by run, where they are not those of its one source.

    tiles (A, B, size): columns that lie as A times B pieces of a size, and are wanted as B times A. Of a
    vector, all values are columns. stack: how each expert's matrix is made of those of the sources.
    """

    runs: tuple[Run, ...] = ()
    tiles: tuple[int, int, int] | None = None
    stack: Stack | None = None


AS_IT_IS = Order()


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


def order_of(config: Any, name: str, sources: list[GgufTensor], *, tiled: bool, turned: bool) -> Order:
    """The order of the weight `name` of the state dict in its sources. tiled, turned: see `Family`."""
    if name.endswith(".linear_attn.in_proj_qkvz.weight") and len(sources) == 2:
        return Order(_by_key_head(config))
    if turned and name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
        return Order(stack=Stack(alternate=len(sources) > 1, turned=True))
    if len(sources) > 1 and all(len(source.shape) == 3 for source in sources):
        return Order(stack=Stack())
    if len(sources) > 1:
        return Order(tuple(Run(i, 0, source.shape[0]) for i, source in enumerate(sources)))
    if tiled and ".linear_attn." in name:
        return _tiled(config, name.rpartition(".linear_attn.")[2])
    return AS_IT_IS


def _by_key_head(config: Any) -> tuple[Run, ...]:
    """Queries, keys, values and gate of one head of keys after the other, of a gate (0) and the rest (1)."""
    heads, size = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // heads * config.linear_value_head_dim
    runs = []
    for head in range(heads):
        runs += [Run(1, head * size, size), Run(1, (heads + head) * size, size)]
        runs += [Run(1, 2 * heads * size + head * values, values), Run(0, head * values, values)]
    return tuple(runs)


def _tiled(config: Any, part: str) -> Order:
    """Heads of values lie as R times all K, and are wanted as K times R."""
    keys, size = config.linear_num_key_heads, config.linear_value_head_dim
    each = config.linear_num_value_heads // keys
    if each == 1:
        return AS_IT_IS
    if part in ("A_log", "dt_bias"):
        return Order(tiles=(each, keys, 1))
    if part == "out_proj.weight":
        return Order(tiles=(each, keys, size))
    before = 0
    if part in ("in_proj_a.weight", "in_proj_b.weight"):
        size = 1
    elif part in ("in_proj_qkv.weight", "conv1d.weight"):
        before = 2 * keys * config.linear_key_head_dim
    elif part != "in_proj_z.weight":
        return AS_IT_IS
    heads = [Run(0, before + (i * keys + key) * size, size) for key in range(keys) for i in range(each)]
    return Order((Run(0, 0, before), *heads) if before else tuple(heads))


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
