"""Model with its headers read: its parts, and how their products are computed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode

from offspec.checkpoint.tensors import PackedInfo, Weight, can_slice, main_format
from offspec.core.errors import UnsupportedModelError
from offspec.model.binding import Binder
from offspec.model.experts import is_experts
from offspec.model.probe.build import build_skeleton
from offspec.model.routed_experts import RoutedExperts, split_experts
from offspec.model.row_counts import ProductShape, RowCounts, find_row_counts, panels_agree
from offspec.model.row_independence import RowIndependentFunctions, RowProducts, has_row_blocks, is_linear
from offspec.model.unpacking import warm_up
from offspec.model.weights import WeightRecipe, map_weights, tied_layer_recipes
from offspec_kernels.backend import choose_backend
from offspec_kernels.tree_attention import warm_up as warm_up_attention


class OpenedModel:
    """Skeleton of a checkpoint, with its weights in four parts: layers, embedding, head, and the rest.

    Opening reads only headers. The embedding stays on disk, and only the rows in use are read, unless it is
    tied to a resident head.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, Weight],
        dtype: torch.dtype,
        device: torch.device,
        *,
        int8_cache: bool = False,
    ) -> None:
        """`int8_cache`: whether the KV cache stores keys and values in 8 bits. Default False."""
        self.skeleton = build_skeleton(folder, dtype)
        self.device, self.dtype, self.int8_cache = device, dtype, int8_cache
        model = self.skeleton.model
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.stored_bytes = sum(weight.nbytes for weight in tensors.values())
        self.stored_format = main_format(tensors.values())
        self.file_format = (
            "gguf" if any(w.file.suffix == ".gguf" for w in tensors.values()) else "safetensors"
        )
        layers: list[list[WeightRecipe]] = [[] for _ in self.skeleton.layers]
        rest: list[WeightRecipe] = []
        self._rows: Weight | None = None
        self._head: WeightRecipe | None = None
        recipes = map_weights(model, tensors)
        # Name of the head in a checkpoint that stores it although it is tied.
        names = {id(module): name for name, module in model.named_modules()}
        head_alias = names[id(model.get_output_embeddings())] + ".weight"
        for recipe in recipes + tied_layer_recipes(model, recipes, self.skeleton.layer_of):
            index = self.skeleton.layer_of(recipe.names[0])
            if index is not None:
                layers[index].append(recipe)
            elif recipe.converter is None and recipe.names == (self.skeleton.head,):
                self._head = recipe
            elif (
                recipe.converter is None
                and recipe.names == (self.skeleton.embedding,)
                and can_slice(recipe.sources[0][0])
            ):
                self._rows = recipe.sources[0][0]  # read from disk row by row
            elif not (self.skeleton.tied and recipe.names[0] == head_alias):
                rest.append(recipe)
            elif recipe.is_packed:
                raise UnsupportedModelError(
                    f"config.json ties the head to the embedding, and {recipe.sources[0][0].file.name} has a "
                    "separate quantized head: set tie_word_embeddings to false in config.json"
                )
        prefix = self.skeleton.layers_prefix
        self.layers = [
            Binder(model, f"layer {i}", recipes, device, f"{prefix}.{i}.") for i, recipes in enumerate(layers)
        ]
        without, found = split_experts(model, layers, self.skeleton.layer_of)
        self.experts = RoutedExperts(found)
        self.dense = [  # the layers without their routed experts
            whole
            if len(recipes) == len(whole.recipes)
            else Binder(model, whole.layout.name, recipes, device, whole.prefix)
            for whole, recipes in zip(self.layers, without, strict=True)
        ]
        self._rest = [Binder(model, "the rest", rest, device)]
        if self._head is not None:
            self._rest.append(Binder(model, "the head", [self._head], device))

    @property
    def is_packed(self) -> bool:
        """Whether layers have packed weights, which are unpacked when they run."""
        return any(binder.is_packed for binder in self.layers)

    @property
    def weight_files(self) -> list[Path]:
        """Files that contain layers."""
        return sorted({extent.file for binder in self.layers for extent in binder.layout.extents})

    def warm_up(self, device: torch.device | None = None) -> None:
        """Compile the code for attention and packed weights, which takes seconds the first time.

        Args:
            device: Compute device of the layers. Default: the model's device.
        """
        device = device or self.device
        if device.type == "cpu":
            warm_up_attention(self.dtype)
        weights = _weights((*self.layers, *self._rest))
        warm_up(weights if self._rows is None else [*weights, self._rows], self.dtype, device)

    @staticmethod
    def has_row_products(device: torch.device) -> bool:
        """Return whether the rows of a product on a device are independent at any row count."""
        return device.type == "cuda" and choose_backend(device) == "triton"

    @cached_property
    def uses_panels(self) -> bool:
        """Whether a CPU may multiply packed weights by panels, with the same bits as unpacked weights."""
        if not self.is_packed or has_row_blocks(torch.device("cpu"), self.dtype):
            return self.is_packed
        weights = _weights((*self.layers, *self._rest))
        packed = [weight for weight in weights if isinstance(weight, PackedInfo) and len(weight.shape) == 2]
        shapes = {ProductShape(each.shape[0], each.shape[1], each.format.transposed) for each in packed}
        return panels_agree(shapes, self.dtype)

    def find_row_counts(self, device: torch.device) -> RowCounts:
        """Find row counts at which no row's bits depend on other rows on a device; tested once."""
        shapes, sums = set[ProductShape](), {int(self.skeleton.config.hidden_size)}
        blocks = has_row_blocks(device, self.dtype)
        for module in [*self.skeleton.layers.modules(), self.skeleton.model.get_output_embeddings()]:
            plain = isinstance(module, torch.nn.Linear)
            for parameter in module.parameters(recurse=False):
                if parameter.dim() == 1 and not plain:  # a norm's weight
                    sums.add(len(parameter))
                if parameter.dim() >= 2:
                    rows, columns = parameter.shape[-2:]
                    if blocks and (is_linear(module) or is_experts(module)):
                        continue
                    shapes.add(ProductShape(rows, columns))
                    if not plain:  # may be multiplied from the other side
                        shapes.add(ProductShape(columns, rows, transposed=True))
        weights = _weights(self.layers)
        if any(isinstance(weight, PackedInfo) and weight.format.transposed for weight in weights):
            shapes |= {replace(shape, transposed=True) for shape in shapes}
        if self.has_row_products(device):  # any row count will do
            shapes.clear()
        return find_row_counts(shapes, sums, self.dtype, device)

    def function_mode(self, row_counts: RowCounts | None, device: torch.device) -> TorchFunctionMode | None:
        """Return a mode that replaces functions with row-dependent bits in a pass on a device, if needed."""
        if row_counts is None:
            return None
        if self.has_row_products(device):
            return RowProducts()
        has_experts = any(is_experts(module) for module in self.skeleton.layers.modules())
        rows = self.skeleton.rows
        needs_it = device.type == "cpu" and (has_experts or rows.expanded or rows.tail_numbers)
        return RowIndependentFunctions(row_counts, has_row_blocks(device, self.dtype)) if needs_it else None


def _weights(binders: Sequence[Binder]) -> list[Weight]:
    return [weight for binder in binders for recipe in binder.recipes for weight, _ in recipe.sources]
