"""Putting weights into a skeleton, and taking them out again."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from offspec.checkpoint.tensors import TensorInfo, torch_dtype
from offspec.model.weights import Recipe
from offspec.store.layout import UnitLayout, lay_out


def layout_of(name: str, recipes: Iterable[Recipe]) -> UnitLayout:
    """The layout of all tensors that the recipes need."""
    infos: dict[str, TensorInfo] = {}
    for recipe in recipes:
        infos.update({info.name: info for info, _ in recipe.sources})
    return lay_out(name, infos.values())


def view_tensor(memory: torch.Tensor, place: int, info: TensorInfo) -> torch.Tensor:
    """The tensor inside a uint8 slot: a view, or a copy where its file offset is not aligned to its dtype."""
    dtype = torch_dtype(info.dtype)
    raw = memory[place : place + info.nbytes]
    if (memory.storage_offset() + place) % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).view(info.shape)


class Binder:
    """Binds the parameters of one unit of a skeleton (a layer, or all that is no layer).

    `realise` makes the tensors, in the dtype and on the device that the model computes with: views of the
    slot where the bytes are already right, copies where they must be converted or fused.
    """

    def __init__(
        self, model: Any, name: str, recipes: list[Recipe], device: torch.device, prefix: str = ""
    ) -> None:
        self.layout = layout_of(name, recipes)
        self.prefix = prefix  # what the names of these parameters begin with inside the model
        self._model = model
        self._recipes = recipes
        self._device = device
        self._homes = {parameter: _home(model, parameter) for recipe in recipes for parameter in recipe.names}
        self._meta = {parameter: _get(home) for parameter, home in self._homes.items()}

    def has(self, parameter: str) -> bool:
        return parameter in self._homes

    @property
    def copied_bytes(self) -> int:
        """Bytes that `realise` allocates beside the slot on every call."""
        total = 0
        for recipe in self._recipes:
            for name in recipe.names:
                meta, info = self._meta[name], recipe.sources[0][0]
                if recipe.converter is not None or torch_dtype(info.dtype) != meta.dtype:
                    total += meta.numel() * meta.dtype.itemsize
        return total

    def realise(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Parameter name to tensor, from a slot (uint8, [slot bytes]) that holds the unit."""
        sources = {
            name: view_tensor(memory, place, info) for name, (place, info) in self.layout.places.items()
        }
        made: dict[str, torch.Tensor] = {}
        for recipe in self._recipes:
            for name, tensor in recipe.realise(sources, self._model).items():
                made[name] = tensor.to(device=self._device, dtype=self._meta[name].dtype)
        return made

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            _set(self._homes[name], tensor)

    def unbind(self, names: Iterable[str] | None = None) -> None:
        """Put the meta tensors back, so that no one computes with a slot that is being refilled."""
        for name in self._homes if names is None else names:
            _set(self._homes[name], self._meta[name])


_Home = tuple[dict[str, Any], str, bool]  # (the module's own dict, key, is it a parameter)


def _home(model: Any, name: str) -> _Home:
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    if key in module._parameters:
        return module._parameters, key, True
    return module._buffers, key, False


def _get(home: _Home) -> torch.Tensor:
    store, key, _ = home
    tensor: torch.Tensor = store[key]
    return tensor


def _set(home: _Home, tensor: torch.Tensor) -> None:
    store, key, is_parameter = home
    if is_parameter and not isinstance(tensor, torch.nn.Parameter):
        tensor = torch.nn.Parameter(tensor, requires_grad=False)
    store[key] = tensor
