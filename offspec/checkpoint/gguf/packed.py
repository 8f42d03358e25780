"""Weights of a GGUF file where they are: the bytes to stream, and the format that makes values of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offspec.checkpoint.gguf.families import family_of
from offspec.checkpoint.gguf.header import GgufHeader
from offspec.checkpoint.gguf.values import AS_IT_IS, GgufRecipe
from offspec.checkpoint.ranges import INSTEAD, one_line
from offspec.checkpoint.tensors import PackedInfo, TensorInfo, Weight
from offspec.core.errors import UnsupportedModelError

if TYPE_CHECKING:
    from offspec_kernels.dequant import Format

_PLAIN = ("F32", "F16", "BF16")  # what safetensors calls them too


def obstacle(header: GgufHeader) -> str:
    """Why the file must be unpacked to be run, or nothing where it can be streamed as it is."""
    from offspec_kernels.dequant.ggml import KINDS

    tables = family_of(header).rope_tables
    weights = [tensor for name, tensor in header.tensors.items() if name not in tables]
    if unknown := sorted({tensor.kind.name for tensor in weights} - set(KINDS)):
        return f"it holds tensors of type {', '.join(unknown)}"
    return ""


def is_little(recipe: GgufRecipe) -> bool:
    """Whether a weight is written anew, since no format says what is done to it, and it is small."""
    vector = len(recipe.shape) == 1 or (len(recipe.shape) == 3 and recipe.shape[1] == 1)
    return recipe.step in ("log of minus", "alternate") or (vector and recipe.order != AS_IT_IS)


def weight(recipe: GgufRecipe) -> Weight:
    """Where a weight lies, and in which format.

    Raises UnsupportedModelError for a tensor that is stored in a way that its weight cannot be.
    """
    from offspec_kernels.errors import ArgumentError

    first, kinds = recipe.sources[0], tuple(source.kind.name for source in recipe.sources)
    if recipe.order == AS_IT_IS and recipe.step == "as it is" and kinds[0] in _PLAIN:
        place = (first.file, first.offset, first.nbytes, first.stamp)
        return TensorInfo(recipe.name, kinds[0], recipe.shape, *place)
    try:
        format = _format(recipe, kinds)
        wanted = format.parts(recipe.shape)
    except ArgumentError as error:
        raise UnsupportedModelError(
            f"{first.file} has tensor {first.name[:100]!r} as {first.kind.name}, which cannot be "
            f"({one_line(error)}): {INSTEAD}"
        ) from error
    parts = [
        (part, TensorInfo(s.name, "U8", found.shape, s.file, s.offset, s.nbytes, s.stamp))
        for (part, found), s in zip(wanted.items(), recipe.sources, strict=True)
    ]
    return PackedInfo(recipe.name, recipe.shape, format, tuple(parts))


def _format(recipe: GgufRecipe, kinds: tuple[str, ...]) -> Format:
    from offspec_kernels.dequant.ggml import Ggml
    from offspec_kernels.dequant.ggml.reordered import Reordered, Stacked

    order = recipe.order
    if order.stack is not None:  # a matrix for each expert, in several tensors or turned
        return Stacked(kinds, tuple(source.shape[1] for source in recipe.sources), *order.stack)
    if order != AS_IT_IS:  # rows or columns in another order, or in several tensors
        rows = tuple(source.shape[0] for source in recipe.sources)
        runs = tuple((run.source, run.start, run.rows) for run in order.runs) or ((0, 0, rows[0]),)
        return Reordered(kinds, rows, runs, order.tiles)
    heads = recipe.heads if recipe.step == "unpermute" else 0
    return Ggml(kinds[0], heads=heads, less_one=recipe.step == "minus one")
