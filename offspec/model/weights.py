"""Mapping from tensors in a checkpoint to parameters of a transformers model.

Most parameters are a single tensor with the same or another name. Some are made of several tensors (fused
experts). transformers' conversion mapping defines this for each of its model types. A single tensor there may
be one tensor per expert in offspec's packs: `X.3` is the fourth part of `X`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from offspec.checkpoint.prefixes import strip_prefixes
from offspec.checkpoint.quantized.common import FLOATS, INSTEAD
from offspec.checkpoint.tensors import PackedInfo, TensorInfo, Weight
from offspec.core.errors import CheckpointError, HeaderError, MissingTensorError

_ONE = re.compile(r"(.+)\.\d{1,9}", re.ASCII)
_STACK = "one of a stack"  # pattern of tensors that are one part each


@dataclass(frozen=True, slots=True)
class WeightRecipe:
    """Recipe for parameters: one tensor unchanged, or several combined by transformers' converter.

    Args:
        names: Names of the parameters.
        sources: Weights, each with the converter's pattern that it matched, in order.
        converter: transformers' converter, or None for one unchanged tensor.
    """

    names: tuple[str, ...]
    sources: tuple[tuple[Weight, str], ...]
    converter: WeightConverter | None = None

    @property
    def is_packed(self) -> bool:
        """Whether any source must be unpacked."""
        return any(isinstance(weight, PackedInfo) for weight, _ in self.sources)

    def materialize(self, tensors: Mapping[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
        """Return tensors by parameter name from the sources' values. Renamed tensors are not copied."""
        if self.converter is None:
            return {self.names[0]: tensors[self.sources[0][0].name]}
        converter: Any = deepcopy(self.converter)
        for info, pattern in self.sources:
            converter.add_tensor(self.names[0], info.name, pattern, tensors[info.name])
        made = converter.convert(self.names[0], model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def map_weights(model: Any, tensors: Mapping[str, Weight]) -> list[WeightRecipe]:
    """Return a recipe for every parameter and persistent buffer of `model` that is not tied to another.

    Args:
        model: Model on the meta device.
        tensors: Weights of the checkpoint by name.

    Raises:
        MissingTensorError: The checkpoint has no tensor for a parameter.
        HeaderError: A parameter is stored as codes of an unknown format.
        CheckpointError: A parameter does not have the shape that the configuration gives.
    """
    wanted = model.state_dict()
    recipes = _matched(model, wanted, tensors)
    if missing := _missing(model, wanted, recipes):
        present = {name for recipe in recipes for name in recipe.names}
        renamed = strip_prefixes(tensors, {name: tuple(wanted[name].shape) for name in missing}, present)
        recipes = _matched(model, wanted, renamed)
    _check(model, wanted, recipes)
    return recipes


def _matched(
    model: Any, wanted: dict[str, torch.Tensor], tensors: Mapping[str, Weight]
) -> list[WeightRecipe]:
    """Return recipes for all parameters that transformers' mapping finds among the tensors' names."""
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    gathered: dict[str, list[tuple[Weight, str]]] = {}

    def parameter(name: str) -> tuple[str, str]:
        """Return the parameter for a tensor name, and the converter's pattern that matched."""
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, wanted)
        return (name, "") if target not in wanted and name in wanted else (target, pattern or "")

    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = parameter(name)
        if target not in wanted and (one := _ONE.fullmatch(name)) and one[1] not in tensors:
            target, pattern = parameter(one[1])
            pattern = pattern or _STACK
        if target in wanted:
            gathered.setdefault(target, []).append((tensors[name], pattern))
    return [_recipe(target, sources, by_pattern) for target, sources in gathered.items()]


def tied_layer_recipes(
    model: Any, recipes: Sequence[WeightRecipe], layer_of: Callable[[str], int | None]
) -> list[WeightRecipe]:
    """Return recipes for layer parameters tied to those of an earlier layer and stored only once."""
    made = {recipe.names[0]: recipe for recipe in recipes if len(recipe.names) == 1}
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    return [
        replace(made[source], names=(name,))
        for name, source in ties.items()
        if layer_of(name) is not None and name not in made and source in made
    ]


def _recipe(
    target: str, sources: list[tuple[Weight, str]], by_pattern: dict[str, WeightConverter]
) -> WeightRecipe:
    pattern = sources[0][1]
    if not pattern:
        return WeightRecipe((target,), (sources[0],))
    if pattern == _STACK:
        return WeightRecipe((target,), tuple(sources), WeightConverter(_STACK, target, [MergeModulelist()]))
    converter = by_pattern[pattern]
    first = converter.target_patterns[0]
    names = tuple(target.replace(first, other) for other in converter.target_patterns)
    return WeightRecipe(names, tuple(sources), converter)


def _missing(model: Any, wanted: Mapping[str, torch.Tensor], recipes: list[WeightRecipe]) -> list[str]:
    """Return the parameters that have no recipe and cannot be tied to others."""
    made = {name for recipe in recipes for name in recipe.names}
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    missing = sorted(name for name in wanted if name not in made and name not in tied)
    # Ties declared by the model class apply only if the configuration enables them; an absent head is tied.
    return [name for name in missing if wanted[name].device.type == "meta"]


def _check(model: Any, wanted: dict[str, torch.Tensor], recipes: list[WeightRecipe]) -> None:
    missing = _missing(model, wanted, recipes)
    if missing:
        raise MissingTensorError(
            f"the checkpoint lacks {missing[0]}"
            + (f" and {len(missing) - 1} more of the tensors" if len(missing) > 1 else "")
            + f" that {type(model).__name__} needs; the download may be incomplete"
        )
    for recipe in recipes:
        for info, _ in recipe.sources if wanted[recipe.names[0]].is_floating_point() else ():
            if isinstance(info, TensorInfo) and info.dtype not in FLOATS:
                raise HeaderError(
                    f"{info.name} is stored as {info.dtype} in {info.file.name}, and the checkpoint does not "
                    f"define the meaning of these numbers; {INSTEAD}"
                )
        info, shape = recipe.sources[0][0], tuple(wanted[recipe.names[0]].shape)
        found = info.shape
        if recipe.sources[0][1] == _STACK:
            alike = all(source.shape == found for source, _ in recipe.sources)
            found = (len(recipe.sources), *found) if alike else ()
        elif recipe.converter is not None:
            _check_made(model, wanted, recipe)
            continue
        if shape != found:
            raise CheckpointError(
                f"{info.name} has shape {list(found)} in {info.file.name}, but config.json requires "
                f"{list(shape)}; the files do not belong together"
            )


def _check_made(model: Any, wanted: Mapping[str, torch.Tensor], recipe: WeightRecipe) -> None:
    """Raise CheckpointError if tensors cannot be combined, or their parameter would have a wrong shape.

    Tested on the meta device; operations that need values are only checked when the values are there.
    """
    first: dict[str, Weight] = {}
    for weight, pattern in recipe.sources:
        if weight.shape != (other := first.setdefault(pattern, weight)).shape and _merges(recipe):
            raise CheckpointError(
                f"{weight.name} has shape {list(weight.shape)}, but {other.name} has {list(other.shape)}; "
                "experts must have equal shapes; download the model again"
            )
    sources = {weight.name: torch.empty(weight.shape, device="meta") for weight, _ in recipe.sources}
    name = recipe.sources[0][0].name
    try:
        made = recipe.materialize(sources, model)
    except (ValueError, RuntimeError, KeyError, IndexError) as error:
        if not _merges(recipe):
            return
        raise CheckpointError(
            f"{name} and the tensors combined with it have incompatible shapes; download the model again"
        ) from error
    for parameter, tensor in made.items():
        if parameter in wanted and tensor.shape != wanted[parameter].shape:
            raise CheckpointError(
                f"{name} and {len(sources) - 1} more tensors make {parameter} of shape {list(tensor.shape)}, "
                f"but config.json requires {list(wanted[parameter].shape)}; the files do not belong together"
            )


def _merges(recipe: WeightRecipe) -> bool:
    """Return whether a recipe only stacks or concatenates its tensors."""
    assert recipe.converter is not None
    operations: list[Any] = recipe.converter.operations
    return all(type(operation) in (MergeModulelist, Concatenate) for operation in operations)
