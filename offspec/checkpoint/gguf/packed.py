"""Weights of a GGUF file where they are: the bytes to stream, and the format that makes values of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from offspec.checkpoint.gguf.families import family_of
from offspec.checkpoint.gguf.header import GgufHeader, GgufTensor
from offspec.checkpoint.gguf.order import AS_IT_IS, Stack
from offspec.checkpoint.gguf.values import GgufRecipe
from offspec.checkpoint.ranges import INSTEAD, one_line
from offspec.checkpoint.tensors import PackedInfo, TensorInfo, Weight
from offspec.core.errors import UnsupportedModelError

if TYPE_CHECKING:
    from offspec_kernels.dequant import Format, Part

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
    import torch

    from offspec_kernels.dequant import Part
    from offspec_kernels.dequant.ggml import Ggml
    from offspec_kernels.errors import ArgumentError

    if recipe.order.stack is not None:
        return _stacked(recipe, recipe.order.stack)
    if recipe.order != AS_IT_IS:
        return _reordered(recipe)
    (source,) = recipe.sources
    place = (source.file, source.offset, source.nbytes, source.stamp)
    kind = source.kind.name
    if recipe.step == "as it is" and kind in _PLAIN:
        return TensorInfo(recipe.name, kind, recipe.shape, *place)
    row = source.nbytes * recipe.shape[-1] // source.values
    blocks = (*recipe.shape[:-1], row)
    heads = recipe.heads if recipe.step == "unpermute" else 0
    try:
        format = Ggml(kind, heads=heads, less_one=recipe.step == "minus one")
        format.check({"blocks": Part(torch.uint8, blocks)}, recipe.shape)
    except ArgumentError as error:
        raise _cannot_be(source, error) from error
    return PackedInfo(
        recipe.name, recipe.shape, format, (("blocks", TensorInfo(source.name, "U8", blocks, *place)),)
    )


def _reordered(recipe: GgufRecipe) -> Weight:
    """A matrix whose rows or columns lie in another order, or in several tensors."""
    from offspec_kernels.dequant.ggml.reordered import Reordered
    from offspec_kernels.errors import ArgumentError

    rows = tuple(source.shape[0] for source in recipe.sources)
    kinds = tuple(source.kind.name for source in recipe.sources)
    runs = tuple((run.source, run.start, run.rows) for run in recipe.order.runs) or ((0, 0, rows[0]),)
    try:
        format = Reordered(kinds, rows, runs, recipe.order.tiles)
        wanted = format.parts(recipe.shape)
    except ArgumentError as error:
        raise _cannot_be(recipe.sources[0], error) from error
    return _in_blocks(recipe, format, wanted)


def _stacked(recipe: GgufRecipe, stack: Stack) -> Weight:
    """A matrix for each expert, in several tensors or turned."""
    from offspec_kernels.dequant.ggml.reordered import Stacked
    from offspec_kernels.errors import ArgumentError

    rows = tuple(source.shape[1] for source in recipe.sources)
    try:
        format = Stacked(tuple(source.kind.name for source in recipe.sources), rows, *stack)
        wanted = format.parts(recipe.shape)
    except ArgumentError as error:
        raise _cannot_be(recipe.sources[0], error) from error
    return _in_blocks(recipe, format, wanted)


def _in_blocks(recipe: GgufRecipe, format: Format, wanted: Mapping[str, Part]) -> PackedInfo:
    parts = [
        (part, TensorInfo(s.name, "U8", found.shape, s.file, s.offset, s.nbytes, s.stamp))
        for (part, found), s in zip(wanted.items(), recipe.sources, strict=True)
    ]
    return PackedInfo(recipe.name, recipe.shape, format, tuple(parts))


def _cannot_be(source: GgufTensor, error: Exception) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{source.file} has tensor {source.name[:100]!r} as {source.kind.name}, which cannot be "
        f"({one_line(error)}): {INSTEAD}"
    )
