"""Weights of a GGUF file in place: the bytes to stream, and the format to dequantize them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offspec.checkpoint.gguf.architectures import architecture_of
from offspec.checkpoint.gguf.dequantize import IDENTITY_ORDER, GgufRecipe
from offspec.checkpoint.gguf.header import GgufHeader
from offspec.checkpoint.ranges import INSTEAD, one_line
from offspec.checkpoint.tensors import PackedInfo, TensorInfo, Weight
from offspec.core.errors import UnsupportedModelError

if TYPE_CHECKING:
    from offspec_kernels.dequant import Format

_PLAIN = ("F32", "F16", "BF16")  # same names as in safetensors


def unstreamable_reason(header: GgufHeader) -> str:
    """Return why the file must be unpacked before it can run; "" if it can be streamed in place."""
    from offspec_kernels.dequant.ggml import KINDS

    tables = architecture_of(header).rope_tables
    weights = [tensor for name, tensor in header.tensors.items() if name not in tables]
    if unknown := sorted({tensor.kind.name for tensor in weights} - set(KINDS)):
        return f"it holds tensors of type {', '.join(unknown)}"
    return ""


def needs_rewrite(recipe: GgufRecipe) -> bool:
    """Return whether a weight must be rewritten: it is small, and no format describes its transformation."""
    vector = len(recipe.shape) == 1 or (len(recipe.shape) == 3 and recipe.shape[1] == 1)
    return recipe.step in ("log of minus", "alternate") or (vector and recipe.order != IDENTITY_ORDER)


def weight(recipe: GgufRecipe) -> Weight:
    """Return a weight's location and format.

    Raises UnsupportedModelError for a tensor type that its weight cannot have.
    """
    from offspec_kernels.errors import ArgumentError

    first, kinds = recipe.sources[0], tuple(source.kind.name for source in recipe.sources)
    if recipe.order == IDENTITY_ORDER and recipe.step == "as it is" and kinds[0] in _PLAIN:
        place = (first.file, first.offset, first.nbytes, first.stamp)
        return TensorInfo(recipe.name, kinds[0], recipe.shape, *place)
    try:
        format = _format(recipe, kinds)
        wanted = format.parts(recipe.shape)
    except ArgumentError as error:
        raise UnsupportedModelError(
            f"{first.file} has tensor {first.name[:100]!r} as {first.kind.name}, which is not supported "
            f"({one_line(error)}): {INSTEAD}"
        ) from error
    parts = [
        (part, TensorInfo(s.name, "U8", found.shape, s.file, s.offset, s.nbytes, s.stamp))
        for (part, found), s in zip(wanted.items(), recipe.sources, strict=True)
    ]
    return PackedInfo(recipe.name, recipe.shape, format, tuple(parts))


def _format(recipe: GgufRecipe, kinds: tuple[str, ...]) -> Format:
    from offspec_kernels.dequant.ggml import Ggml
    from offspec_kernels.dequant.ggml.reordered import ReorderedGgml, StackedGgml

    order = recipe.order
    if order.stack is not None:  # one matrix per expert, in several tensors or transposed
        return StackedGgml(kinds, tuple(source.shape[1] for source in recipe.sources), *order.stack)
    if order != IDENTITY_ORDER:  # rows or columns in another order, or in several tensors
        rows = tuple(source.shape[0] for source in recipe.sources)
        runs = tuple((run.source, run.start, run.rows) for run in order.runs) or ((0, 0, rows[0]),)
        return ReorderedGgml(kinds, rows, runs, order.tiles)
    heads = recipe.heads if recipe.step == "unpermute" else 0
    return Ggml(kinds[0], heads=heads, less_one=recipe.step == "minus one")
