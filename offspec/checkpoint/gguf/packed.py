"""Weights of a GGUF file where they are: the bytes to stream, and the format that makes values of them."""

from __future__ import annotations

from offspec.checkpoint.gguf.header import GgufHeader
from offspec.checkpoint.gguf.rope import rope_tables
from offspec.checkpoint.gguf.values import GgufRecipe
from offspec.checkpoint.ranges import INSTEAD, one_line
from offspec.checkpoint.tensors import PackedInfo, TensorInfo, Weight
from offspec.core.errors import UnsupportedModelError

_PLAIN = ("F32", "F16", "BF16")  # what safetensors calls them too


def obstacle(header: GgufHeader) -> str:
    """Why the file must be unpacked to be run, or nothing where it can be streamed as it is."""
    from offspec_kernels.dequant.ggml import KINDS

    tables = rope_tables(str(header.metadata.get("general.architecture")))
    weights = [tensor for name, tensor in header.tensors.items() if name not in tables]
    if any("_exps." in tensor.name for tensor in weights):
        return "it keeps experts apart that the model has in one tensor"
    if unknown := sorted({tensor.kind.name for tensor in weights} - set(KINDS)):
        return f"it holds tensors of type {', '.join(unknown)}"
    return ""


def weight(recipe: GgufRecipe) -> Weight:
    """Where a weight lies that is made of one tensor, and in which format.

    Raises UnsupportedModelError for a tensor that is stored in a way that its weight cannot be.
    """
    import torch

    from offspec_kernels.dequant import Part
    from offspec_kernels.dequant.ggml import Ggml
    from offspec_kernels.errors import ArgumentError

    (source,) = recipe.sources
    place = (source.file, source.offset, source.nbytes)
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
        raise UnsupportedModelError(
            f"{source.file} has tensor {source.name[:100]!r} as {kind}, which cannot be "
            f"({one_line(error)}): {INSTEAD}"
        ) from error
    return PackedInfo(
        recipe.name, recipe.shape, format, (("blocks", TensorInfo(source.name, "U8", blocks, *place)),)
    )
