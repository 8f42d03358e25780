"""Binding of weights to the parameters of a skeleton model."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch

from offspec.checkpoint.tensors import PackedInfo, TensorInfo, Weight, stored_tensors, torch_dtype
from offspec.model.row_independence import has_row_blocks
from offspec.model.unpacking import ModuleUnpacker, Scratch, is_read_directly, view_in, weight_in
from offspec.model.weights import WeightRecipe
from offspec.stream.layout import UnitLayout, lay_out
from offspec_kernels.errors import ArgumentError
from offspec_kernels.packed_linear import is_supported, packed_linear

_CPU = torch.device("cpu")


def _rounds_later(module: torch.nn.Linear) -> bool:
    """Return whether torch adds the module's bias before rounding, which panels cannot reproduce."""
    return module.bias is not None and not has_row_blocks(_CPU, torch.bfloat16)


def layout_of(name: str, recipes: Iterable[WeightRecipe]) -> UnitLayout:
    """Return the layout of all stored tensors that the recipes read."""
    infos: dict[str, TensorInfo] = {}
    for recipe in recipes:
        infos.update({info.name: info for weight, _ in recipe.sources for info in stored_tensors(weight)})
    return lay_out(name, infos.values())


class Binder:
    """Binds the parameters of one unit of a skeleton: a layer, or everything outside the layers.

    `materialize` makes all tensors in the model's compute dtype and on its device. They are views of the slot
    if the stored bytes can be used as they are, and copies if they must be converted, fused or unpacked.
    `attach` leaves packed weights packed; they are unpacked when their module runs. `device` is the compute
    device of the unit's modules and may be set until the first weight is bound.
    """

    def __init__(
        self, model: Any, name: str, recipes: list[WeightRecipe], device: torch.device, prefix: str = ""
    ) -> None:
        self.layout = layout_of(name, recipes)
        self.prefix = prefix  # of the names of these parameters within the model
        self._model = model
        self.recipes = recipes
        self.device = device
        self._homes = {parameter: _home(model, parameter) for recipe in recipes for parameter in recipe.names}
        self.parameters: Mapping[str, torch.Tensor] = {  # without values
            parameter: store[key] for parameter, (store, key, _) in self._homes.items()
        }
        self.by_panels = False  # whether linear modules may multiply packed weights panel by panel
        self._memory: torch.Tensor | None = None  # slot of the attached packed weights
        self._known: set[Weight] = set()  # packed weights checked to have finite values
        self._linears: dict[ModuleUnpacker, tuple[torch.nn.Linear, PackedInfo]] = {}
        self._plain, waiting = list[WeightRecipe](), dict[str, list[WeightRecipe]]()
        for recipe in recipes:
            modules = {parameter.rpartition(".")[0] for parameter in recipe.names}
            # A wrapper of the layer itself would run before the layer's weights are attached.
            runs = modules != {prefix.rstrip(".")} and not any(map(is_read_directly, recipe.names))
            if recipe.is_packed and len(modules) == 1 and runs:
                waiting.setdefault(modules.pop(), []).append(recipe)
            else:
                self._plain.append(recipe)
        self._unpackers = [self._unpacker(module, found) for module, found in waiting.items()]
        self.is_packed = bool(waiting)  # whether `attach` leaves any weight packed
        self._any_packed = any(recipe.is_packed for recipe in recipes)

    def _unpacker(self, module: str, recipes: list[WeightRecipe]) -> ModuleUnpacker:
        names = [name for recipe in recipes for name in recipe.names]
        owner = self._model.get_submodule(module)
        weight = recipes[0].sources[0][0]
        plain = type(owner) is torch.nn.Linear and names == [f"{module}.weight"] and not recipes[0].converter
        linear = (owner, weight) if plain and isinstance(weight, PackedInfo) else None
        unpacker = ModuleUnpacker(
            owner,
            sum(self.parameters[name].numel() for name in names),
            lambda out: self._made(self._attached(), recipes, out),
            self.bind,
            lambda: self._restore(names),
            (lambda input: self._product(*linear, input)) if linear else None,
        )
        if linear:
            self._linears[unpacker] = linear
        return unpacker

    @cached_property
    def _by_panels(self) -> set[ModuleUnpacker]:
        """Unpackers that can multiply by panels. Evaluated lazily: it loads and runs compiled code."""
        return {
            each
            for each, (module, weight) in self._linears.items()
            if not _rounds_later(module) and is_supported(weight.format, weight.shape)
        }

    def _product(
        self, module: torch.nn.Linear, weight: PackedInfo, input: torch.Tensor
    ) -> torch.Tensor | None:
        """Return a linear module's product, panel by panel; None if the whole weight must be unpacked."""
        if not self.by_panels or _rounds_later(module):
            return None
        memory = self._attached()
        parts = {part: view_in(memory, self.layout, info) for part, info in weight.parts}
        rows = input.reshape(-1, input.shape[-1])
        try:
            out = packed_linear(rows, weight.format, parts, weight.shape, module.bias)
        except ArgumentError:
            return None  # unpacking the whole weight raises an error that names the file
        if out is None:
            return None
        if weight not in self._known and len(rows):
            # A NaN or infinity survives any product, so the whole weight is unpacked only if there may be
            # one.
            if not bool(torch.isfinite(out.sum(dtype=torch.float32))):
                return None
            self._known.add(weight)
        return out.view(*input.shape[:-1], weight.shape[0])

    def scratch_elements(self, by_panels: bool) -> int:
        """Return the packed values of the largest module that cannot multiply by panels."""
        whole = [each.elements for each in self._unpackers if not (by_panels and each in self._by_panels)]
        return max(whole, default=0)

    @property
    def panel_elements(self) -> int:
        """Number of packed values that are multiplied by panels."""
        return sum(each.elements for each in self._by_panels)

    @cached_property
    def fused_elements(self) -> int:
        """Number of temporary values while packed weights are fused: the result and one intermediate."""
        fused = [recipe.names for recipe in self.recipes if recipe.is_packed and recipe.converter]
        return max((2 * sum(self.parameters[name].numel() for name in names) for names in fused), default=0)

    @property
    def unpacked_elements(self) -> int:
        """Number of values unpacked each time the unit runs."""
        return sum(unpacker.elements for unpacker in self._unpackers)

    @property
    def unpacked_bytes(self) -> int:
        """Stored size in bytes of the weights unpacked each time the unit runs."""
        waiting = [recipe for recipe in self.recipes if recipe.is_packed and recipe not in self._plain]
        return sum(weight.nbytes for recipe in waiting for weight, _ in recipe.sources)

    @cached_property
    def copied_bytes(self) -> int:
        """Bytes that `attach` allocates outside the slot on every call."""
        return self._copies(self._plain)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the tensors from `materialize`, including the memory that they are views of."""
        copies = self._copies(self.recipes)
        every = sum(meta.numel() * meta.dtype.itemsize for meta in self.parameters.values())
        if copies == every or self._any_packed:
            return every
        return copies + self.layout.nbytes

    def _copies(self, recipes: list[WeightRecipe]) -> int:
        total = 0
        for recipe in recipes:
            for name in recipe.names:
                meta, info = self.parameters[name], recipe.sources[0][0]
                stored = torch_dtype(info.dtype) if isinstance(info, TensorInfo) else None
                if recipe.converter is not None or stored != meta.dtype:
                    total += meta.numel() * meta.dtype.itemsize
        return total

    def install(self, scratch: Scratch) -> None:
        """Unpack packed weights into `scratch` whenever their module runs. Call before the first `attach`."""
        for unpacker in self._unpackers:
            unpacker.install(scratch)

    def materialize(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return tensors by parameter name, made from a slot (uint8, [slot bytes]) that holds the unit.

        Raises CheckpointError if a packed weight is damaged.
        """
        if not self._any_packed:
            return self._made(memory, self.recipes, self._empty)
        if memory.device.type == "cpu":
            memory = self.layout.copy_to_device(memory, self.device)  # unpack on the compute device
        made = self._made(memory, self.recipes, self._empty)
        # A view of a norm would keep the whole packed layer in memory.
        stored = memory.untyped_storage().data_ptr()
        return {
            name: tensor.clone() if tensor.untyped_storage().data_ptr() == stored else tensor
            for name, tensor in made.items()
        }

    def _empty(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=self._model.dtype, device=self.device)

    def _made(
        self, memory: torch.Tensor, recipes: list[WeightRecipe], out: Callable[[int], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        made: dict[str, torch.Tensor] = {}
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            for recipe in recipes:
                sources = {
                    weight.name: weight_in(memory, self.layout, weight, out, self._known)
                    for weight, _ in recipe.sources
                }
                for name, tensor in recipe.materialize(sources, self._model).items():
                    made[name] = tensor.to(device=self.device, dtype=self.parameters[name].dtype)
        return made

    def attach(self, memory: torch.Tensor) -> None:
        """Bind the weights in a slot on the model's device. The slot must stay unchanged until `unbind`."""
        self._memory = memory
        self.bind(self._made(memory, self._plain, self._empty))

    def _attached(self) -> torch.Tensor:
        assert self._memory is not None, "a module ran while its layer was not attached"
        return self._memory

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            _set(self._homes[name], tensor)

    def unbind(self, names: Iterable[str] | None = None) -> None:
        """Restore the meta tensors, so that nothing computes with a slot that is being refilled."""
        self._memory = None
        self._restore(self._homes if names is None else names)

    def _restore(self, names: Iterable[str]) -> None:
        for name in names:
            _set(self._homes[name], self.parameters[name])

    def close(self) -> None:
        """Unbind and restore the model's own forward methods."""
        self.unbind()
        for unpacker in self._unpackers:
            unpacker.remove()


_Home = tuple[dict[str, Any], str, bool]  # (the module's own dict, key, is it a parameter)


def _home(model: Any, name: str) -> _Home:
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    if key in module._parameters:
        return module._parameters, key, True
    return module._buffers, key, False


def _set(home: _Home, tensor: torch.Tensor) -> None:
    store, key, is_parameter = home
    if is_parameter and not isinstance(tensor, torch.nn.Parameter):
        tensor = torch.nn.Parameter(tensor, requires_grad=False)
    store[key] = tensor
