"""The routed experts of a model taken apart from its layers, to be read when they are asked for."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from offspec.checkpoint.tensors import Weight, can_slice, slice_of
from offspec.model.expert_unit import ExpertUnit, OneExpert, realised
from offspec.model.experts import ExpertsBeside, is_experts, parameter_names
from offspec.model.weights import WeightRecipe
from offspec.stream.device_experts import DeviceExpertStore
from offspec.stream.expert_store import ExpertStore

Recipe = Callable[[int], WeightRecipe]  # of some parameters, for one expert by its number
AnyExpertStore = ExpertStore | DeviceExpertStore


@dataclass(frozen=True)
class ExpertModule:
    """The routed experts of one module.

    Args:
        model: As `OneExpert` shows it.
        module: Of transformers, which asks `run_experts`.
        layer: Its layer's number.
        name: Of the layer's unit, with the module's number where there are several.
        recipes: Of its parameters.
    """

    model: OneExpert
    module: Any
    layer: int
    name: str
    recipes: tuple[Recipe, ...]

    @cached_property
    def units(self) -> list[ExpertUnit]:
        """By expert."""
        return [
            ExpertUnit(self.model, f"{self.name}, expert {expert}", [of(expert) for of in self.recipes])
            for expert in range(self.module.num_experts)
        ]

    @property
    def is_packed(self) -> bool:
        """Whether any of their weights has to be unpacked."""
        return any(recipe(0).is_packed for recipe in self.recipes)


class RoutedExperts:
    """All routed experts of a model that can be read one by one; there may be none."""

    def __init__(self, modules: Sequence[ExpertModule]) -> None:
        self.modules = tuple(modules)

    @cached_property
    def units(self) -> list[ExpertUnit]:
        """Those of all modules."""
        return [unit for module in self.modules for unit in module.units]

    @property
    def groups(self) -> list[int]:
        """Of each unit the number of its module."""
        return [place for place, module in enumerate(self.modules) for _ in range(module.module.num_experts)]

    @property
    def layers(self) -> frozenset[int]:
        """Layers that have any."""
        return frozenset(module.layer for module in self.modules)

    @property
    def count(self) -> int:
        """How many there are in all."""
        return sum(module.module.num_experts for module in self.modules)

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of the largest; 0 where there are none."""
        return max((unit.layout.nbytes for unit in self.units), default=0)

    @cached_property
    def nbytes(self) -> int:
        """Bytes that all of them take on disk."""
        return sum(unit.layout.nbytes for unit in self.units)

    @cached_property
    def copied_bytes(self) -> int:
        """Bytes that are allocated while one runs, at most."""
        return max((module.units[0].copied_bytes for module in self.modules), default=0)


class ExpertFetch:
    """The experts of one module out of a store of all.

    Args:
        store: Of the units of all modules.
        module: Whose experts these are.
        first: The number of its first unit.
    """

    def __init__(self, store: AnyExpertStore, module: ExpertModule, first: int) -> None:
        self._store, self._module, self._first = store, module, first
        self._views: dict[int, tuple[int, dict[str, torch.Tensor]]] = {}  # by expert, and where it was

    def fetch(
        self, experts: Sequence[int], counts: Sequence[int], rows: int
    ) -> Iterator[tuple[int, Mapping[str, torch.Tensor]]]:
        """See `ExpertSource`. Raises what `ExpertStore.fetch` raises."""
        for unit, memory in self._store.fetch([self._first + expert for expert in experts], counts, rows):
            expert = unit - self._first
            yield expert, self._made(expert, memory)

    def _made(self, expert: int, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Making views takes longer than a small product, so they are kept while their slot is the same."""
        place, made = self._views.get(expert, (-1, {}))  # all slots are of one memory
        if place == memory.storage_offset():
            return made
        made = self._module.units[expert].made(memory)
        slot = memory.untyped_storage().data_ptr()
        if all(tensor.untyped_storage().data_ptr() == slot for tensor in made.values()):
            self._views[expert] = int(memory.storage_offset()), made
        return made


def attach(experts: RoutedExperts, store: AnyExpertStore | None, beside: ExpertsBeside | None = None) -> None:
    """Have all modules ask the store, or nobody where it is None.

    beside: where they are computed, if not where their layers are. Default None.
    """
    first = 0
    for found in experts.modules:
        found.module.source = ExpertFetch(store, found, first).fetch if store is not None else None
        found.module.beside = beside
        first += found.module.num_experts


def split_experts(
    model: Any, layers: Sequence[Sequence[WeightRecipe]], layer_of: Callable[[str], int | None]
) -> tuple[list[list[WeightRecipe]], list[ExpertModule]]:
    """The recipes of each layer without its routed experts, and those experts.

    Experts that cannot be made one by one stay with their layer.
    """
    dense, found = [list(recipes) for recipes in layers], list[ExpertModule]()
    one = OneExpert(model)
    for path, module in model.named_modules():
        layer = layer_of(path + ".") if is_experts(module) else None
        if layer is None or module.num_experts < 2:
            continue
        names = {f"{path}.{name}" for name in parameter_names(module)}
        own = [recipe for recipe in dense[layer] if names.issuperset(recipe.names)]
        apart = [_apart(recipe, module.num_experts, one) for recipe in own]
        recipes = tuple(recipe for recipe in apart if recipe is not None)
        if {name for recipe in own for name in recipe.names} != names or len(recipes) < len(own):
            continue
        before = sum(other.layer == layer for other in found)
        name = f"layer {layer}" + (f", part {before}" if before else "")
        found.append(ExpertModule(one, module, layer, name, recipes))
        dense[layer] = [recipe for recipe in dense[layer] if recipe not in own]
    return dense, found


def _apart(recipe: WeightRecipe, experts: int, model: OneExpert) -> Recipe | None:
    """The recipe for one expert alone; None where there can be none."""
    by_pattern: dict[str, list[Weight]] = {}
    for weight, pattern in recipe.sources:
        by_pattern.setdefault(pattern, []).append(weight)
    for weights in by_pattern.values():
        stacked = len(weights) == 1 and can_slice(weights[0]) and weights[0].shape[0] == experts
        if len(weights) != experts and not stacked:
            return None
    made = partial(_alone, recipe, by_pattern)
    try:
        sources = {weight.name: torch.empty(weight.shape, device="meta") for weight, _ in made(0).sources}
        shapes = [tensor.shape for tensor in realised(made(0), sources, model)]
    except (ValueError, RuntimeError, KeyError, IndexError):  # an operation over all experts
        return None
    return made if shapes == [model.get_parameter(name).shape for name in recipe.names] else None


def _alone(recipe: WeightRecipe, by_pattern: Mapping[str, list[Weight]], expert: int) -> WeightRecipe:
    sources = tuple(
        (slice_of(weights[0], expert) if len(weights) == 1 else weights[expert], pattern)
        for pattern, weights in by_pattern.items()
    )
    return replace(recipe, sources=sources)
