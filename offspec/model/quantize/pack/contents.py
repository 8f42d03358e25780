"""What a pack will hold: which weights are rounded, which stay, and the file that each goes to."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from offspec.checkpoint import Checkpoint
from offspec.checkpoint.open import gguf_rounding
from offspec.checkpoint.pack_manifest import Shape, format_of
from offspec.checkpoint.tensors import PackedInfo, TensorInfo, bytes_of, cut, item_size
from offspec.checkpoint.write import Entry
from offspec.core.config import PackFormat
from offspec.core.errors import UnsupportedModelError
from offspec.core.events import Event
from offspec.model.experts import is_experts, parameter_names
from offspec.model.probe.build import build_skeleton
from offspec.model.unpacking import is_read_directly
from offspec.model.weights import WeightRecipe, map_weights

GROUP = 64  # weights that share a scale in every format; groups do not go beyond a row
FLOATS = ("BF16", "F16", "F32")
# A tensor of one expert, by the checkpoint's name, or by that of a stack of them.
_EXPERT = re.compile(r"(.+\.experts)\.(?:(\d{1,9})\..+|\w+\.(\d{1,9}))", re.ASCII)
_REST = "model-rest.safetensors"
_DTYPES = {torch.uint8: "U8", torch.float16: "F16"}


@dataclass(frozen=True, slots=True)
class FileContents:
    """One file of a pack: a decoder layer, or all that is no layer. packed: rounded; kept: as they are.

    Those that are kept come first, the wider before the others, so that all are aligned to their own size.
    What belongs to an expert comes behind all that does not, in one piece, to be read in one go.
    """

    name: str
    packed: tuple[TensorInfo, ...]
    kept: tuple[TensorInfo, ...]

    @property
    def source_bytes(self) -> int:
        """Bytes that are read for it."""
        return sum(info.nbytes for info in (*self.packed, *self.kept))

    @property
    def tensors(self) -> list[tuple[TensorInfo, bool]]:
        """In the order in which they are written, and whether each is rounded."""
        every = [(info, False) for info in self.kept] + [(info, True) for info in self.packed]
        return sorted(every, key=lambda each: _place(each[0]))

    def entries(self, to: PackFormat) -> list[Entry]:
        """The tensors it is written as."""
        found = list[Entry]()
        for info, rounds in self.tensors:
            if rounds:
                parts = stored_parts(info.shape, to)
                found += [(f"{info.name}.{part}", dtype, shape) for part, dtype, shape in parts]
            else:
                found.append((info.name, kept_dtype(info), info.shape))
        return found


def plan_contents(source: Checkpoint, to: PackFormat) -> list[FileContents]:
    """The files of a pack, the rest first.

    Rounded are the matrices of decoder layers whose rows are whole groups, except routers and what layers
    read directly. Reads headers only; raises what opening the model raises, and UnsupportedModelError where
    nothing can be rounded.
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
            f"{source.name} cannot be packed: no matrix of its layers has rows of whole groups of {GROUP}"
        )
    return files


def stored_parts(shape: Shape, to: PackFormat) -> list[tuple[str, str, Shape]]:
    """Name, safetensors dtype and shape of what a weight is stored in; the first are its codes."""
    parts = format_of(to).parts(shape)
    return [(name, _DTYPES[part.dtype], part.shape) for name, part in parts.items() if name != "table"]


def kept_dtype(info: TensorInfo) -> str:
    """What a tensor that is not rounded is stored as: numbers in bfloat16, anything else as it is."""
    return "BF16" if info.dtype in FLOATS else info.dtype


def packed_bytes(files: Sequence[FileContents], to: PackFormat) -> int:
    """Bytes of all tensors that will be written."""
    return sum(bytes_of(dtype, tuple(shape)) for file in files for _, dtype, shape in file.entries(to))


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
    """Parameters that have something of each expert of a layer, and how many those are."""
    return {
        f"{path}.{name}": module.num_experts
        for path, module in model.named_modules()
        if is_experts(module) and module.num_experts > 1
        for name in parameter_names(module)
    }


def _each_expert(info: TensorInfo, count: int) -> list[TensorInfo]:
    """What a tensor that is stacked of `count` experts has of each; the tensor where it is none such."""
    if not count or info.shape[:1] != (count,):
        return [info]
    found = list[TensorInfo]()
    for expert in range(count):
        one = cut(info, expert, expert + 1)
        assert isinstance(one, TensorInfo)
        found.append(replace(one, name=f"{info.name}.{expert}", shape=info.shape[1:]))
    return found


def _place(info: TensorInfo) -> tuple[int, str, int]:
    """Experts come in their order, behind what is none; what has the same place stays as it was."""
    found = _EXPERT.fullmatch(info.name)
    return (1, found[1], int(found[2] or found[3])) if found else (0, "", 0)


def _is_matrix(info: TensorInfo) -> bool:
    """Whether a tensor can be rounded: a matrix, or a stack of one for each expert, with whole groups."""
    return (
        len(info.shape) in (2, 3)
        and info.dtype in FLOATS
        and info.shape[-1] % GROUP == 0
        and math.prod(info.shape) > 0
    )


def is_router(parameter: str) -> bool:
    """Whether a parameter decides which experts a token goes to: small, and the worse for every rounding."""
    modules = parameter.split(".")[:-1]
    return any(name in ("gate", "shared_expert_gate") or name.startswith("router") for name in modules)


def refuse_rounded(model: str, notify: Callable[[Event], None]) -> None:
    """Raise UnsupportedModelError for a GGUF file whose weights were rounded before."""
    if kind := gguf_rounding(model, notify):
        raise UnsupportedModelError(
            f"{_rounded(model, kind)}; `offspec pack --again` rounds it a second time, which loses more"
        )


def refuse_packed(source: Checkpoint) -> None:
    """Raise UnsupportedModelError for weights that were rounded before and cannot be unpacked here."""
    for weight in source.tensors.values():
        if isinstance(weight, PackedInfo):
            raise UnsupportedModelError(_rounded(source.name, weight.format.name))
        if weight.dtype.startswith("F8"):
            raise UnsupportedModelError(
                f"{source.name} holds {weight.dtype} weights without scales: name the bf16 model"
            )


def _rounded(model: str, kind: str) -> str:
    original = "the bf16 model that it was made from"
    return f"{model} is quantised already ({kind}): run it as it is, or name {original}"
