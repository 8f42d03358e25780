"""A single routed expert: its location on disk and the recipe for its parameters.

transformers' converters make the parameters of all experts of a layer. Given the tensors of one expert only,
they make that expert's parameters, [1, ...] each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers.core_model_loading import Concatenate, MergeModulelist

from offspec.checkpoint.tensors import TensorInfo, Weight, torch_dtype
from offspec.model.binding import layout_of
from offspec.model.unpacking import weight_in
from offspec.model.weights import WeightRecipe
from offspec.stream.layout import UnitLayout


class SingleExpertModel:
    """Model as converters see it, with expert parameters of a single expert."""

    def __init__(self, model: Any) -> None:
        self._parameters: dict[str, torch.Tensor] = {}
        self._model = model
        self.config, self.dtype = model.config, model.dtype

    def get_parameter(self, name: str) -> torch.Tensor:
        """Return a parameter [1, ...] on the meta device."""
        if name not in self._parameters:
            self._parameters[name] = self._model.get_parameter(name)[:1]
        return self._parameters[name]


class ExpertUnit:
    """Single expert: its layout on disk, and the recipes for its parameters, [1, ...] each.

    Args:
        model: Model of the expert.
        name: Name of the unit.
        recipes: Recipes for the expert's parameters.
    """

    def __init__(self, model: SingleExpertModel, name: str, recipes: Sequence[WeightRecipe]) -> None:
        self._model, self._recipes, self._known = model, recipes, set[Weight]()
        self.layout = layout_of(name, recipes)
        self._swap = next(filter(None, (_find_swap(recipe, self.layout) for recipe in recipes)), None)
        self.arranged = self.layout if self._swap is None else self._swap.applied(self.layout)

    def arrange(self, memory: torch.Tensor) -> None:
        """Make parts of a slot (uint8 [slot bytes]) adjacent after a read, which saves copies later."""
        if self._swap is not None:
            self._swap.apply(memory)

    def make_parameters(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the expert's parameters by their names in the module, without the expert dimension.

        They are views of the slot if possible.

        Args:
            memory: uint8 [slot bytes], the arranged slot of the expert, in RAM or on a device.

        Raises:
            CheckpointError: A packed weight is damaged.
        """
        found: dict[str, torch.Tensor] = {}
        empty = partial(torch.empty, dtype=self._model.dtype, device=memory.device)
        for recipe in self._recipes:
            sources = {
                weight.name: weight_in(memory, self.arranged, weight, empty, self._known)
                for weight, _ in recipe.sources
            }
            for name, tensor in zip(
                recipe.names, materialize_with_views(recipe, sources, self._model), strict=True
            ):
                meta = self._model.get_parameter(name)
                found[name.rpartition(".")[2]] = tensor.to(meta.dtype)[0]
        return found

    @property
    def copied_bytes(self) -> int:
        """Maximum bytes that `make_parameters` allocates, total of all steps."""
        total = 0
        for recipe in self._recipes:
            sizes = [self._model.get_parameter(name) for name in recipe.names]
            made = sum(meta.numel() * meta.dtype.itemsize for meta in sizes)
            operations: list[Any] = recipe.converter.operations if recipe.converter is not None else []
            steps = sum(not _is_view(operation) for operation in operations)
            converted = any(
                not isinstance(weight, TensorInfo) or torch_dtype(weight.dtype) != sizes[0].dtype
                for weight, _ in recipe.sources
            )
            total += made * (steps + converted)
        return total


@dataclass(frozen=True, slots=True)
class _Swap:
    """Swap of bytes [begin, middle) of a slot with the following bytes [middle, end)."""

    begin: int
    middle: int
    end: int

    def apply(self, memory: torch.Tensor) -> None:
        first, second = memory[self.begin : self.middle].clone(), memory[self.middle : self.end]
        target = memory[self.begin : self.begin + len(second)]
        target.copy_(second if len(second) <= len(first) else second.clone())  # they may overlap
        memory[self.begin + len(second) : self.end].copy_(first)

    def applied(self, layout: UnitLayout) -> UnitLayout:
        """Return the layout after the swap."""
        return layout.moved(
            {name: (self._moved(place), info) for name, (place, info) in layout.places.items()}
        )

    def _moved(self, place: int) -> int:
        if self.begin <= place < self.middle:
            return place + self.end - self.middle
        return place - (self.middle - self.begin) if self.middle <= place < self.end else place


def _find_swap(recipe: WeightRecipe, layout: UnitLayout) -> _Swap | None:
    """Return the swap that makes two parts of a parameter adjacent; None if not needed or not possible."""
    if recipe.converter is None or len(recipe.sources) != 2 or recipe.is_packed:
        return None
    operations: list[Any] = recipe.converter.operations
    if not all(_is_view(operation) or type(operation) is Concatenate for operation in operations):
        return None
    patterns: list[str] = recipe.converter.source_patterns
    sources = sorted(recipe.sources, key=lambda source: patterns.index(source[1]))
    (first, one), (second, other) = (layout.places[weight.name] for weight, _ in sources)
    if first < second:
        found = _Swap(first + one.nbytes, second, second + other.nbytes)
    else:
        found = _Swap(second, first, first + one.nbytes)
    return found if found.begin < found.middle else None


def _is_view(operation: Any) -> bool:
    return type(operation) is MergeModulelist and operation.dim == 0


def materialize_with_views(
    recipe: WeightRecipe, sources: Mapping[str, torch.Tensor], model: SingleExpertModel
) -> list[torch.Tensor]:
    """Make the tensors of `WeightRecipe.materialize` in the order of its names, as views if possible."""
    if recipe.converter is None:
        return [sources[recipe.sources[0][0].name]]
    converter: Any = recipe.converter
    found: dict[str, Any] = {pattern: [sources[weight.name]] for weight, pattern in recipe.sources}
    for operation in converter.operations:
        if _is_view(operation):
            found = {
                operation.get_target_pattern(len(found), pattern, converter.target_patterns): tensor[None]
                for pattern, (tensor,) in found.items()
            }
            continue
        if type(operation) is Concatenate:
            parts = [_only(found[pattern]) for pattern in converter.source_patterns if pattern in found]
            if (joined := _joined(parts, operation.dim)) is not None:
                found = {operation.get_target_pattern(converter.target_patterns): joined}
                continue
        found = operation.convert(
            found,
            source_patterns=converter.source_patterns,
            target_patterns=converter.target_patterns,
            full_layer_name=recipe.names[0],
            model=model,
            config=model.config,
            missing_keys=None,
        )
    return [_only(found[target]) for target in converter.target_patterns]


def _only(value: Any) -> torch.Tensor:
    tensor: torch.Tensor = value[0] if isinstance(value, list) else value
    return tensor


def _joined(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor | None:
    """Return adjacent parts in memory as one tensor, or None if they are not adjacent."""
    first, end = parts[0], parts[0].storage_offset()
    dim %= first.dim()
    for part in parts:
        same = (
            part.device.type != "meta"
            and part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        )
        if not same or not part.is_contiguous() or part.storage_offset() != end:
            return None
        end += part.numel()
    if any(size != 1 for size in first.shape[:dim]):
        return None
    shape = [*first.shape[:dim], sum(part.shape[dim] for part in parts), *first.shape[dim + 1 :]]
    strides = torch.empty(shape, device="meta").stride()
    return first.as_strided(shape, strides, first.storage_offset())
