"""Putting weights into a skeleton, and taking them out again."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch

from offspec.checkpoint.tensors import PackedInfo, TensorInfo, Weight, on_disk, torch_dtype
from offspec.model.row_independence import has_row_blocks
from offspec.model.unpacking import ModuleUnpacker, Scratch, is_read_directly, view_in, weight_in
from offspec.model.weights import WeightRecipe
from offspec.stream.layout import UnitLayout, lay_out
from offspec_kernels.errors import ArgumentError
from offspec_kernels.packed_linear import has_panels, packed_linear

_CPU = torch.device("cpu")


def _rounds_later(module: torch.nn.Linear) -> bool:
    """Whether a module's own product adds a bias before it rounds, as torch's does, and panels do not."""
    return module.bias is not None and not has_row_blocks(_CPU, torch.bfloat16)


def layout_of(name: str, recipes: Iterable[WeightRecipe]) -> UnitLayout:
    """The layout of all tensors that the recipes need."""
    infos: dict[str, TensorInfo] = {}
    for recipe in recipes:
        infos.update({info.name: info for weight, _ in recipe.sources for info in on_disk(weight)})
    return lay_out(name, infos.values())


class Binder:
    """Binds the parameters of one unit of a skeleton (a layer, or all that is no layer).

    `realise` makes all tensors, in the dtype and on the device that the model computes with: views of the
    slot where the bytes are already right, copies where they must be converted, fused or unpacked. `attach`
    leaves packed weights packed: their values are made when their module runs. device: where its modules are
    computed, which may be set before there is any weight.
    """

    def __init__(
        self, model: Any, name: str, recipes: list[WeightRecipe], device: torch.device, prefix: str = ""
    ) -> None:
        self.layout = layout_of(name, recipes)
        self.prefix = prefix  # what the names of these parameters begin with inside the model
        self._model = model
        self.recipes = recipes
        self.device = device
        self._homes = {parameter: _home(model, parameter) for recipe in recipes for parameter in recipe.names}
        self.parameters: Mapping[str, torch.Tensor] = {  # without values
            parameter: store[key] for parameter, (store, key, _) in self._homes.items()
        }
        self.by_panels = False  # whether linear modules may multiply packed weights panel by panel
        self._memory: torch.Tensor | None = None  # what packed weights are attached to
        self._known: set[Weight] = set()  # packed ones whose values are numbers
        self._linears: dict[ModuleUnpacker, tuple[torch.nn.Linear, PackedInfo]] = {}
        self._plain, waiting = list[WeightRecipe](), dict[str, list[WeightRecipe]]()
        for recipe in recipes:
            modules = {parameter.rpartition(".")[0] for parameter in recipe.names}
            # What wraps a layer itself would run before the layer has been entered.
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
        """Those that can do without all values. Asked for late: it loads and runs compiled code."""
        return {
            each
            for each, (module, weight) in self._linears.items()
            if not _rounds_later(module) and has_panels(weight.format, weight.shape)
        }

    def _product(
        self, module: torch.nn.Linear, weight: PackedInfo, input: torch.Tensor
    ) -> torch.Tensor | None:
        """A linear module's product, panel by panel; None where it is to be made of all values."""
        if not self.by_panels or _rounds_later(module):
            return None
        memory = self._attached()
        parts = {part: view_in(memory, self.layout, info) for part, info in weight.parts}
        rows = input.reshape(-1, input.shape[-1])
        try:
            out = packed_linear(rows, weight.format, parts, weight.shape, module.bias)
        except ArgumentError:
            return None  # as its values are made, the file is named
        if out is None:
            return None
        if weight not in self._known and len(rows):
            # A value that is no number survives any product: only where one may have is all of it unpacked.
            if not bool(torch.isfinite(out.sum(dtype=torch.float32))):
                return None
            self._known.add(weight)
        return out.view(*input.shape[:-1], weight.shape[0])

    def scratch_elements(self, by_panels: bool) -> int:
        """Values of the module with the most packed weights, of those that panels are not made of."""
        whole = [each.elements for each in self._unpackers if not (by_panels and each in self._by_panels)]
        return max(whole, default=0)

    @property
    def panel_elements(self) -> int:
        """Values of all that panels are made of."""
        return sum(each.elements for each in self._by_panels)

    @cached_property
    def fused_elements(self) -> int:
        """Values that are there besides while packed weights are fused: the outcome, and one before it."""
        fused = [recipe.names for recipe in self.recipes if recipe.is_packed and recipe.converter]
        return max((2 * sum(self.parameters[name].numel() for name in names) for names in fused), default=0)

    @property
    def unpacked_elements(self) -> int:
        """Values that are unpacked whenever the unit runs."""
        return sum(unpacker.elements for unpacker in self._unpackers)

    @property
    def unpacked_bytes(self) -> int:
        """Bytes that those are stored in."""
        waiting = [recipe for recipe in self.recipes if recipe.is_packed and recipe not in self._plain]
        return sum(weight.nbytes for recipe in waiting for weight, _ in recipe.sources)

    @cached_property
    def copied_bytes(self) -> int:
        """Bytes that `attach` allocates beside the slot on every call."""
        return self._copies(self._plain)

    @property
    def kept_bytes(self) -> int:
        """Bytes that the tensors of `realise` take, the memory that they are views of included."""
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
        """Have packed weights unpacked in `scratch` whenever their module runs; before the first `attach`."""
        for unpacker in self._unpackers:
            unpacker.install(scratch)

    def realise(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Parameter name to tensor, from a slot (uint8, [slot bytes]) that holds the unit.

        Raises CheckpointError for a packed weight that is damaged.
        """
        if not self._any_packed:
            return self._made(memory, self.recipes, self._empty)
        if memory.device.type == "cpu":
            memory = self.layout.put_on(memory, self.device)  # unpacked where it is used
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
                for name, tensor in recipe.realise(sources, self._model).items():
                    made[name] = tensor.to(device=self.device, dtype=self.parameters[name].dtype)
        return made

    def attach(self, memory: torch.Tensor) -> None:
        """Bind the weights in a slot on the model's device, which is theirs until `unbind`."""
        self._memory = memory
        self.bind(self._made(memory, self._plain, self._empty))

    def _attached(self) -> torch.Tensor:
        assert self._memory is not None, "a module ran outside its layer's turn"
        return self._memory

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            _set(self._homes[name], tensor)

    def unbind(self, names: Iterable[str] | None = None) -> None:
        """Put the meta tensors back, so that no one computes with a slot that is being refilled."""
        self._memory = None
        self._restore(self._homes if names is None else names)

    def _restore(self, names: Iterable[str]) -> None:
        for name in names:
            _set(self._homes[name], self.parameters[name])

    def close(self) -> None:
        """Unbind, and give the model its own forwards back."""
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
