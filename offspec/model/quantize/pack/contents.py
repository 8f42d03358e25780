"""Contents of a pack: which weights are quantized, which are kept, and in which file."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from offspec.checkpoint import Checkpoint
from offspec.checkpoint.open import gguf_quantization
from offspec.checkpoint.pack_manifest import Shape, format_of
from offspec.checkpoint.safetensors_writer import Entry
from offspec.checkpoint.tensors import PackedInfo, TensorInfo, item_size, nbytes_of, slice_rows
from offspec.core.config import PackFormat
from offspec.core.errors import UnsupportedModelError
from offspec.core.events import Event
from offspec.model.experts import is_experts, parameter_names
from offspec.model.probe.build import build_skeleton
from offspec.model.unpacking import is_read_directly
from offspec.model.weights import WeightRecipe, map_weights

GROUP = 64  # weights that share a scale in every format; groups do not span rows
FLOATS = ("BF16", "F16", "F32")
# Name of one expert's tensor: in the checkpoint, or derived from that of a stack.
_EXPERT = re.compile(r"(.+\.experts)\.(?:(\d{1,9})\..+|\w+\.(\d{1,9}))", re.ASCII)
_REST = "model-rest.safetensors"
_DTYPES = {torch.uint8: "U8", torch.float16: "F16"}


@dataclass(frozen=True, slots=True)
class FileContents:
    """Contents of one file of a pack: a decoder layer, or everything outside the layers.

    Kept tensors come first, wider dtypes before narrower ones, so that all are aligned to their item size.
    Tensors of experts come after all others, each expert's in one piece, so that one read gets them all.

    Args:
        name: Name of the file.
        packed: Tensors that are quantized.
        kept: Tensors that are not quantized.
    """

    name: str
    packed: tuple[TensorInfo, ...]
    kept: tuple[TensorInfo, ...]

    @property
    def source_bytes(self) -> int:
        """Bytes of the source tensors."""
        return sum(info.nbytes for info in (*self.packed, *self.kept))

    @property
    def tensors(self) -> list[tuple[TensorInfo, bool]]:
        """Tensors in the order of writing, each with whether it is quantized."""
        every = [(info, False) for info in self.kept] + [(info, True) for info in self.packed]
        return sorted(every, key=lambda each: _place(each[0]))

    def entries(self, to: PackFormat) -> list[Entry]:
        """Return the tensors that are written to the file."""
        found = list[Entry]()
        for info, rounds in self.tensors:
            if rounds:
                parts = stored_parts(info.shape, to)
                found += [(f"{info.name}.{part}", dtype, shape) for part, dtype, shape in parts]
            else:
                found.append((info.name, kept_dtype(info), info.shape))
        return found


def plan_contents(source: Checkpoint, to: PackFormat) -> list[FileContents]:
    """Return the files of a pack, with the one outside the layers first.

    Matrices of decoder layers are quantized if their rows consist of whole groups, except routers and
    matrices that layers read directly. Reads only headers. Raises the errors of opening the model, and
    UnsupportedModelError if nothing can be quantized.
    """
    skeleton = build_skeleton(source.folder, torch.bfloat16)
    by_layer: dict[int, list[WeightRecipe]] = {}
    for recipe in map_weights(skeleton.model, source.tensors):
        layer = skeleton.layer_of(recipe.names[0])
        by_layer.setdefault(-1 if layer is None else layer, []).append(recipe)
    experts = _experts(skeleton.model)
    files = [_contents(layer, recipes, experts) for layer, recipes in sorted(by_layer.items())]
    if not any(file.packed for file in files):
        raise UnsupportedModelError(
            f"{source.name} cannot be packed: no matrix of its layers has a row length divisible by {GROUP}"
        )
    return files


def stored_parts(shape: Shape, to: PackFormat) -> list[tuple[str, str, Shape]]:
    """Return name, safetensors dtype and shape of each stored part of a weight, the codes first."""
    parts = format_of(to).parts(shape)
    return [(name, _DTYPES[part.dtype], part.shape) for name, part in parts.items() if name != "table"]


def kept_dtype(info: TensorInfo) -> str:
    """Return the stored dtype of a kept tensor: bfloat16 for floats, anything else unchanged."""
    return "BF16" if info.dtype in FLOATS else info.dtype


def packed_bytes(files: Sequence[FileContents], to: PackFormat) -> int:
    """Return the total bytes of all tensors to be written."""
    return sum(nbytes_of(dtype, tuple(shape)) for file in files for _, dtype, shape in file.entries(to))


def _contents(layer: int, recipes: list[WeightRecipe], experts: Mapping[str, int]) -> FileContents:
    packed, kept = list[TensorInfo](), list[TensorInfo]()
    for recipe in recipes:
        rounds = layer >= 0 and not (is_router(recipe.names[0]) or is_read_directly(recipe.names[0]))
        count = experts.get(recipe.names[0], 0) if recipe.converter is None else 0
        for source, _ in recipe.sources:
            assert isinstance(source, TensorInfo)
            for info in _each_expert(source, count):
                (packed if rounds and _is_matrix(info) else kept).append(info)
    kept.sort(key=lambda info: -item_size(kept_dtype(info)))
    name = _REST if layer < 0 else f"model-layer-{layer:04}.safetensors"
    return FileContents(name, tuple(packed), tuple(kept))


def _experts(model: Any) -> dict[str, int]:
    """Return parameters that contain all experts of a layer, with the number of experts."""
    return {
        f"{path}.{name}": module.num_experts
        for path, module in model.named_modules()
        if is_experts(module) and module.num_experts > 1
        for name in parameter_names(module)
    }


def _each_expert(info: TensorInfo, count: int) -> list[TensorInfo]:
    """Split a stack of `count` experts' tensors; return any other tensor unchanged."""
    if not count or info.shape[:1] != (count,):
        return [info]
    found = list[TensorInfo]()
    for expert in range(count):
        one = slice_rows(info, expert, expert + 1)
        assert isinstance(one, TensorInfo)
        found.append(replace(one, name=f"{info.name}.{expert}", shape=info.shape[1:]))
    return found


def _place(info: TensorInfo) -> tuple[int, str, int]:
    """Return a sort key that puts experts in order after all other tensors."""
    found = _EXPERT.fullmatch(info.name)
    return (1, found[1], int(found[2] or found[3])) if found else (0, "", 0)


def _is_matrix(info: TensorInfo) -> bool:
    """Return whether a tensor can be quantized: a matrix, or a stack of experts, in whole groups."""
    return (
        len(info.shape) in (2, 3)
        and info.dtype in FLOATS
        and info.shape[-1] % GROUP == 0
        and math.prod(info.shape) > 0
    )


def is_router(parameter: str) -> bool:
    """Return whether a parameter routes tokens to experts; it is small, and quantization errors harm most."""
    modules = parameter.split(".")[:-1]
    return any(name in ("gate", "shared_expert_gate") or name.startswith("router") for name in modules)


def refuse_quantized(model: str, notify: Callable[[Event], None]) -> None:
    """Raise UnsupportedModelError for a GGUF file whose weights are already quantized."""
    if kind := gguf_quantization(model, notify):
        raise UnsupportedModelError(
            f"{_quantized(model, kind)}; `offspec pack --again` quantizes it again, with a further loss"
        )


def refuse_packed(source: Checkpoint) -> None:
    """Raise UnsupportedModelError for quantized weights that cannot be unpacked here."""
    for weight in source.tensors.values():
        if isinstance(weight, PackedInfo):
            raise UnsupportedModelError(_quantized(source.name, weight.format.name))
        if weight.dtype.startswith("F8"):
            raise UnsupportedModelError(
                f"{source.name} has {weight.dtype} weights without scales; use the bf16 model"
            )


def _quantized(model: str, kind: str) -> str:
    original = "the bf16 model that it was made from"
    return f"{model} is quantized already ({kind}): run it as it is, or use {original}"
