"""What a pack will hold: which weights are rounded, which stay, and the file that each goes to."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offspec.checkpoint import Checkpoint
from offspec.checkpoint.pack_manifest import Shape, format_of
from offspec.checkpoint.tensors import PackedInfo, TensorInfo, bytes_of, item_size
from offspec.checkpoint.write import Entry
from offspec.core.config import PackFormat
from offspec.core.errors import UnsupportedModelError
from offspec.model.probe.build import build_skeleton
from offspec.model.weights import WeightRecipe, map_weights

GROUP = 64  # weights that share a scale in every format; groups do not go beyond a row
FLOATS = ("BF16", "F16", "F32")
_REST = "model-rest.safetensors"
_DTYPES = {torch.uint8: "U8", torch.float16: "F16"}


@dataclass(frozen=True, slots=True)
class FileContents:
    """One file of a pack: a decoder layer, or all that is no layer. packed: rounded; kept: as they are.

    Those that are kept come first, the wider before the others, so that all are aligned to their own size.
    """

    name: str
    packed: tuple[TensorInfo, ...]
    kept: tuple[TensorInfo, ...]

    @property
    def source_bytes(self) -> int:
        """Bytes that are read for it."""
        return sum(info.nbytes for info in (*self.packed, *self.kept))

    def entries(self, to: PackFormat) -> list[Entry]:
        """The tensors it is written as."""
        return [(info.name, kept_dtype(info), info.shape) for info in self.kept] + [
            (f"{info.name}.{part}", dtype, shape)
            for info in self.packed
            for part, dtype, shape in stored_parts(info.shape, to)
        ]


def plan_contents(source: Checkpoint, to: PackFormat) -> list[FileContents]:
    """The files of a pack, the rest first.

    Rounded are the matrices of decoder layers whose rows are whole groups, except routers. Reads headers
    only; raises what opening the model raises, and UnsupportedModelError where nothing can be rounded.
    """
    skeleton = build_skeleton(source.folder, torch.bfloat16)
    by_layer: dict[int, list[WeightRecipe]] = {}
    for recipe in map_weights(skeleton.model, source.tensors):
        layer = skeleton.layer_of(recipe.names[0])
        by_layer.setdefault(-1 if layer is None else layer, []).append(recipe)
    files = [_contents(layer, recipes) for layer, recipes in sorted(by_layer.items())]
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


def _contents(layer: int, recipes: list[WeightRecipe]) -> FileContents:
    packed, kept = list[TensorInfo](), list[TensorInfo]()
    for recipe in recipes:
        rounds = layer >= 0 and not _is_router(recipe.names[0])
        for info, _ in recipe.sources:
            assert isinstance(info, TensorInfo)
            (packed if rounds and _is_matrix(info) else kept).append(info)
    kept.sort(key=lambda info: -item_size(kept_dtype(info)))
    name = _REST if layer < 0 else f"model-layer-{layer:04}.safetensors"
    return FileContents(name, tuple(packed), tuple(kept))


def _is_matrix(info: TensorInfo) -> bool:
    """Whether a tensor can be rounded: a matrix, or a stack of one for each expert, with whole groups."""
    return (
        len(info.shape) in (2, 3)
        and info.dtype in FLOATS
        and info.shape[-1] % GROUP == 0
        and math.prod(info.shape) > 0
    )


def _is_router(parameter: str) -> bool:
    """Whether a parameter decides which experts a token goes to: small, and the worse for every rounding."""
    modules = parameter.split(".")[:-1]
    return any(name in ("gate", "shared_expert_gate") or name.startswith("router") for name in modules)


def refuse_packed(source: Checkpoint) -> None:
    """Raise UnsupportedModelError for weights that were rounded before."""
    for weight in source.tensors.values():
        if isinstance(weight, PackedInfo):
            raise UnsupportedModelError(
                f"{source.name} is quantised already ({weight.format.name}): run it as it is, or name the "
                "bf16 model that it was made from"
            )
        if weight.dtype.startswith("F8"):
            raise UnsupportedModelError(
                f"{source.name} holds {weight.dtype} weights without scales: name the bf16 model"
            )
