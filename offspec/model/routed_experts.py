"""Routed experts of a model, separated from its layers for on-demand loading."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from offspec.checkpoint.tensors import Weight, can_slice, slice_of
from offspec.model.expert_unit import ExpertUnit, SingleExpertModel, materialize_with_views
from offspec.model.experts import ExpertDevice, is_experts, parameter_names
from offspec.model.weights import WeightRecipe
from offspec.stream.device_expert_store import DeviceExpertStore
from offspec.stream.expert_store import ExpertStore

Recipe = Callable[[int], WeightRecipe]  # expert number -> recipe for some of its parameters
AnyExpertStore = ExpertStore | DeviceExpertStore


@dataclass(frozen=True)
class ExpertModule:
    """Routed experts of one module.

    Args:
        model: Model with single-expert parameters.
        module: transformers module that calls `run_experts`.
        layer: Number of the module's layer.
        name: Name of the layer's unit, with the module's number if the layer has several.
        recipes: Recipes for the parameters of an expert.
    """

    model: SingleExpertModel
    module: Any
    layer: int
    name: str
    recipes: tuple[Recipe, ...]

    @cached_property
    def units(self) -> list[ExpertUnit]:
        """Units of the experts, by expert number."""
        return [
            ExpertUnit(self.model, f"{self.name}, expert {expert}", [of(expert) for of in self.recipes])
            for expert in range(self.module.num_experts)
        ]

    @property
    def is_packed(self) -> bool:
        """Whether any expert weight must be unpacked."""
        return any(recipe(0).is_packed for recipe in self.recipes)


class RoutedExperts:
    """All routed experts of a model that can be read one by one; may be empty."""

    def __init__(self, modules: Sequence[ExpertModule]) -> None:
        self.modules = tuple(modules)

    @cached_property
    def units(self) -> list[ExpertUnit]:
        """Units of all modules' experts."""
        return [unit for module in self.modules for unit in module.units]

    @property
    def groups(self) -> list[int]:
        """Module number of each unit."""
        return [place for place, module in enumerate(self.modules) for _ in range(module.module.num_experts)]

    @property
    def layers(self) -> frozenset[int]:
        """Layers with routed experts."""
        return frozenset(module.layer for module in self.modules)

    @property
    def count(self) -> int:
        """Total number of experts."""
        return sum(module.module.num_experts for module in self.modules)

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of the largest expert; 0 if there are none."""
        return max((unit.layout.nbytes for unit in self.units), default=0)

    @cached_property
    def nbytes(self) -> int:
        """Total bytes of all experts on disk."""
        return sum(unit.layout.nbytes for unit in self.units)

    @cached_property
    def copied_bytes(self) -> int:
        """Maximum bytes allocated while one expert runs."""
        return max((module.units[0].copied_bytes for module in self.modules), default=0)


class ModuleExpertStore:
    """View of a store of all experts for the experts of one module.

    Args:
        store: Store of the units of all modules.
        module: Module of the experts.
        first: Number of the module's first unit.
    """

    def __init__(self, store: AnyExpertStore, module: ExpertModule, first: int) -> None:
        self._store, self._module, self._first = store, module, first
        self._views: dict[int, tuple[int, dict[str, torch.Tensor]]] = {}  # offset of the slot, parameters

    def fetch(
        self, experts: Sequence[int], counts: Sequence[int], rows: int
    ) -> Iterator[tuple[int, Mapping[str, torch.Tensor]]]:
        """Fetch experts as an `ExpertSource`. Raises the errors of `ExpertStore.fetch`."""
        for unit, memory in self._store.fetch([self._first + expert for expert in experts], counts, rows):
            expert = unit - self._first
            yield expert, self._made(expert, memory)

    def _made(self, expert: int, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return an expert's parameters, cached by slot: making views is slower than a small product."""
        place, made = self._views.get(expert, (-1, {}))  # all slots are in one allocation
        if place == memory.storage_offset():
            return made
        made = self._module.units[expert].make_parameters(memory)
        slot = memory.untyped_storage().data_ptr()
        if all(tensor.untyped_storage().data_ptr() == slot for tensor in made.values()):
            self._views[expert] = int(memory.storage_offset()), made
        return made


def attach_expert_store(
    experts: RoutedExperts, store: AnyExpertStore | None, expert_device: ExpertDevice | None = None
) -> None:
    """Make all modules fetch their experts from a store, or detach them if it is None.

    Args:
        experts: Routed experts of the model.
        store: Store of all experts, or None.
        expert_device: Compute device of the experts. Default: the devices of their layers.
    """
    first = 0
    for found in experts.modules:
        found.module.source = ModuleExpertStore(store, found, first).fetch if store is not None else None
        found.module.expert_device = expert_device
        first += found.module.num_experts


def split_experts(
    model: Any, layers: Sequence[Sequence[WeightRecipe]], layer_of: Callable[[str], int | None]
) -> tuple[list[list[WeightRecipe]], list[ExpertModule]]:
    """Return each layer's recipes without its routed experts, and the modules of these experts.

    Experts that cannot be made one by one stay in their layer.
    """
    dense, found = [list(recipes) for recipes in layers], list[ExpertModule]()
    one = SingleExpertModel(model)
    for path, module in model.named_modules():
        layer = layer_of(path + ".") if is_experts(module) else None
        if layer is None or module.num_experts < 2:
            continue
        names = {f"{path}.{name}" for name in parameter_names(module)}
        own = [recipe for recipe in dense[layer] if names.issuperset(recipe.names)]
        single = [_single_recipe(recipe, module.num_experts, one) for recipe in own]
        recipes = tuple(recipe for recipe in single if recipe is not None)
        if {name for recipe in own for name in recipe.names} != names or len(recipes) < len(own):
            continue
        before = sum(other.layer == layer for other in found)
        name = f"layer {layer}" + (f", part {before}" if before else "")
        found.append(ExpertModule(one, module, layer, name, recipes))
        dense[layer] = [recipe for recipe in dense[layer] if recipe not in own]
    return dense, found


def _single_recipe(recipe: WeightRecipe, experts: int, model: SingleExpertModel) -> Recipe | None:
    """Return the recipe for a single expert, or None if experts cannot be separated."""
    by_pattern: dict[str, list[Weight]] = {}
    for weight, pattern in recipe.sources:
        by_pattern.setdefault(pattern, []).append(weight)
    for weights in by_pattern.values():
        stacked = len(weights) == 1 and can_slice(weights[0]) and weights[0].shape[0] == experts
        if len(weights) != experts and not stacked:
            return None
    made = partial(_recipe_for, recipe, by_pattern)
    try:
        sources = {weight.name: torch.empty(weight.shape, device="meta") for weight, _ in made(0).sources}
        shapes = [tensor.shape for tensor in materialize_with_views(made(0), sources, model)]
    except (ValueError, RuntimeError, KeyError, IndexError):  # an operation over all experts
        return None
    return made if shapes == [model.get_parameter(name).shape for name in recipe.names] else None


def _recipe_for(recipe: WeightRecipe, by_pattern: Mapping[str, list[Weight]], expert: int) -> WeightRecipe:
    sources = tuple(
        (slice_of(weights[0], expert) if len(weights) == 1 else weights[expert], pattern)
        for pattern, weights in by_pattern.items()
    )
    return replace(recipe, sources=sources)
