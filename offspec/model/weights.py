"""From tensors in a checkpoint to parameters of a transformers model.

Most parameters are one tensor under another name, or the same name. Some are made of several (fused
experts). transformers knows how for every family it has (its conversion mapping), so that is asked. What is
one tensor there may be one for each expert in our packs: `X.3` is the fourth of what `X` is made of.
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
from offspec.checkpoint.quantised.parts import FLOATS, INSTEAD
from offspec.checkpoint.tensors import PackedInfo, TensorInfo, Weight
from offspec.core.errors import CheckpointError, HeaderError, MissingTensorError

_ONE = re.compile(r"(.+)\.\d{1,9}", re.ASCII)
_STACK = "one of a stack"  # the pattern of such tensors


@dataclass(frozen=True, slots=True)
class WeightRecipe:
    """How some parameters are made: from one tensor as it is, or from several by transformers' converter.

    names: the parameters; sources: (weight, the converter's pattern it matched), in order.
    """

    names: tuple[str, ...]
    sources: tuple[tuple[Weight, str], ...]
    converter: WeightConverter | None = None

    @property
    def is_packed(self) -> bool:
        """Whether any source has to be unpacked."""
        return any(isinstance(weight, PackedInfo) for weight, _ in self.sources)

    def realise(self, tensors: Mapping[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
        """Parameter name to tensor, given the sources' values by name. A renamed tensor is not copied."""
        if self.converter is None:
            return {self.names[0]: tensors[self.sources[0][0].name]}
        converter: Any = deepcopy(self.converter)
        for info, pattern in self.sources:
            converter.add_tensor(self.names[0], info.name, pattern, tensors[info.name])
        made = converter.convert(self.names[0], model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def map_weights(model: Any, tensors: Mapping[str, Weight]) -> list[WeightRecipe]:
    """A recipe for every parameter and persistent buffer of `model` that is not tied to another.

    model is on the meta device. Raises MissingTensorError for a parameter that nothing in the checkpoint
    makes, HeaderError for one of codes that nothing explains, CheckpointError for one of another shape than
    the configuration says.
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
    """Recipes for the parameters whose names transformers' mapping finds among those of the tensors."""
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    gathered: dict[str, list[tuple[Weight, str]]] = {}

    def parameter(name: str) -> tuple[str, str]:
        """What a tensor of this name makes, and the converter's pattern that says so."""
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


def shared_by_layers(
    model: Any, recipes: Sequence[WeightRecipe], layer_of: Callable[[str], int | None]
) -> list[WeightRecipe]:
    """Recipes of layers' parameters that are those of an earlier layer, and that a checkpoint has once."""
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
    """Parameters that no recipe makes, less those that may be tied to others."""
    made = {name for recipe in recipes for name in recipe.names}
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    missing = sorted(name for name in wanted if name not in made and name not in tied)
    # A tie declared by the family holds only where the configuration asks for it; an absent head is tied.
    return [name for name in missing if wanted[name].device.type == "meta"]


def _check(model: Any, wanted: dict[str, torch.Tensor], recipes: list[WeightRecipe]) -> None:
    missing = _missing(model, wanted, recipes)
    if missing:
        raise MissingTensorError(
            f"the checkpoint lacks {missing[0]}"
            + (f" and {len(missing) - 1} more of the tensors" if len(missing) > 1 else "")
            + f" that {type(model).__name__} needs; is the download whole?"
        )
    for recipe in recipes:
        for info, _ in recipe.sources if wanted[recipe.names[0]].is_floating_point() else ():
            if isinstance(info, TensorInfo) and info.dtype not in FLOATS:
                raise HeaderError(
                    f"{info.name} is stored as {info.dtype} in {info.file.name}, and the checkpoint does not "
                    f"say what its numbers stand for; {INSTEAD}"
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
                f"{info.name} has shape {list(found)} in {info.file.name}, but config.json asks for "
                f"{list(shape)}; the two do not belong together"
            )


def _check_made(model: Any, wanted: Mapping[str, torch.Tensor], recipe: WeightRecipe) -> None:
    """Raise CheckpointError for tensors that cannot be put together, or make a parameter of another shape.

    Tried on the meta device: what an operation can do only with values is found out when it has them.
    """
    first: dict[str, Weight] = {}
    for weight, pattern in recipe.sources:
        if weight.shape != (other := first.setdefault(pattern, weight)).shape and _merges(recipe):
            raise CheckpointError(
                f"{weight.name} has shape {list(weight.shape)}, but {other.name} has {list(other.shape)}, "
                "and experts are alike; download the model again"
            )
    sources = {weight.name: torch.empty(weight.shape, device="meta") for weight, _ in recipe.sources}
    name = recipe.sources[0][0].name
    try:
        made = recipe.realise(sources, model)
    except (ValueError, RuntimeError, KeyError, IndexError) as error:
        if not _merges(recipe):
            return
        raise CheckpointError(
            f"the shapes of {name} and the tensors beside it do not fit each other; download the model again"
        ) from error
    for parameter, tensor in made.items():
        if parameter in wanted and tensor.shape != wanted[parameter].shape:
            raise CheckpointError(
                f"{name} and {len(sources) - 1} more tensors make {parameter} of shape {list(tensor.shape)}, "
                f"but config.json asks for {list(wanted[parameter].shape)}; the two do not belong together"
            )


def _merges(recipe: WeightRecipe) -> bool:
    """Whether its tensors are only put side by side."""
    assert recipe.converter is not None
    operations: list[Any] = recipe.converter.operations
    return all(type(operation) in (MergeModulelist, Concatenate) for operation in operations)
