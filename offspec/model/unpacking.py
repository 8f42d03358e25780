"""Packed weights made into values just before their module runs, in memory that all modules share.

A packed weight stays as it lies in the file, in its slot or where it was loaded to. Its values are made when
its module is about to run, and taken away after: the largest module's are all that is ever there.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from offspec.checkpoint.tensors import PackedInfo, TensorInfo, Weight, can_slice, cut, on_disk, torch_dtype
from offspec.core.errors import CheckpointError
from offspec.model.patches import wrap
from offspec.stream.arena import Arena
from offspec.stream.layout import UnitLayout
from offspec_kernels.dequant import dequantise
from offspec_kernels.errors import ArgumentError
from offspec_kernels.noise import gumbel_row
from offspec_kernels.packed_linear import packed_linear

_WARM_UP_ROWS = 64  # a multiple of 16, as weights have: Triton compiles numbers that are none apart
_REMEDY = "download the model, or pack it, again"


def is_read_directly(name: str) -> bool:
    """Return whether layers read the matrix of this name without running its module: Mamba's do so."""
    return name.endswith("dt_proj.weight")


class Scratch:
    """A stack of values in one piece of memory, since a module may run inside another.

    `taken` counts those in use; a caller of `take` sets it back afterwards.

    Args:
        elements: The most that is taken at once; more is allocated for the time it is needed.
        dtype: Of the values.
        device: Where they are.
    """

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        if device.type == "cpu":  # in huge pages, where the system has them
            self._memory = Arena(elements * dtype.itemsize).tensor.view(dtype)[:elements]
        else:
            self._memory = torch.empty(elements, dtype=dtype, device=device)
        self.taken = 0

    def take(self, elements: int) -> torch.Tensor:
        """[elements] of memory with whatever it holds."""
        start = self.taken
        self.taken += elements
        if self.taken > len(self._memory):
            return self._memory.new_empty(elements)
        return self._memory[start : self.taken]

    def lend(self, elements: int) -> torch.Tensor:
        """The same until anything else is taken."""
        mark = self.taken
        memory = self.take(elements)
        self.taken = mark
        return memory


def weight_in(
    memory: torch.Tensor,
    layout: UnitLayout,
    weight: Weight,
    out: Callable[[int], torch.Tensor],
    known: set[Weight],
) -> torch.Tensor:
    """A weight's values, from memory (uint8, [slot bytes]) that holds its unit; see `values_of`."""
    views = {info.name: view_in(memory, layout, info) for info in on_disk(weight)}
    return values_of(weight, views, out, known)


def view_in(memory: torch.Tensor, layout: UnitLayout, tensor: TensorInfo) -> torch.Tensor:
    """The tensor inside a slot: a view, or a copy where its offset there is not aligned to its dtype."""
    place, info = layout.places_on(memory.device)[tensor.name]
    dtype = torch_dtype(info.dtype)
    raw = memory[place : place + info.nbytes]
    if (memory.storage_offset() + place) % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).view(info.shape)


def values_of(
    weight: Weight,
    views: Mapping[str, torch.Tensor],
    out: Callable[[int], torch.Tensor],
    known: set[Weight],
) -> torch.Tensor:
    """A weight's values: the stored tensor itself, or what it unpacks to.

    Args:
        weight: Stored as it is, or packed.
        views: Its stored tensors by name.
        out: Gives memory for a number of values of a packed one.
        known: Packed weights whose values were found to be numbers; added to.

    Raises:
        CheckpointError: Parts that make no values, or values that are no numbers, as damaged scales make.
    """
    if not isinstance(weight, PackedInfo):
        return views[weight.name]
    parts = {part: views[info.name] for part, info in weight.parts}
    try:
        values = dequantise(weight.format, parts, weight.shape, out(math.prod(weight.shape)))
    except ArgumentError as error:
        raise CheckpointError(
            f"{weight.name} in {weight.file} cannot be unpacked: {error}; {_REMEDY}"
        ) from error
    if weight not in known:
        if not bool(torch.isfinite(values.sum(dtype=torch.float32))):  # either survives any sum
            raise CheckpointError(
                f"{weight.name} in {weight.file} has values that are no numbers: "
                f"the file is damaged; {_REMEDY}"
            )
        known.add(weight)
    return values


class ModuleUnpacker:
    """Binds the packed weights of one module while it runs.

    make(out) gives its parameters by name, with values in memory from out(elements); put(tensors) binds them,
    and drop() puts back what was there. elements: values that it makes in all. product(input) is what the
    module makes of its input where that takes no values of a whole weight, else None.
    """

    def __init__(
        self,
        module: Any,
        elements: int,
        make: Callable[[Callable[[int], torch.Tensor]], dict[str, torch.Tensor]],
        put: Callable[[Mapping[str, torch.Tensor]], None],
        drop: Callable[[], None],
        product: Callable[[torch.Tensor], torch.Tensor | None] | None = None,
    ) -> None:
        self.elements = elements
        self._product = product
        self._module, self._make, self._put, self._drop = module, make, put, drop
        self._undo: Callable[[], None] | None = None

    def install(self, scratch: Scratch) -> None:
        self._undo = wrap(self._module, self._run, scratch)

    def _run(self, own: Callable[..., Any], scratch: Scratch, /, *args: Any, **kwargs: Any) -> Any:
        if self._product is not None and (out := self._product(*args, **kwargs)) is not None:
            return out
        mark = scratch.taken
        try:
            self._put(self._make(scratch.take))
            return own(*args, **kwargs)
        finally:
            self._drop()
            scratch.taken = mark

    def remove(self) -> None:
        if self._undo is not None:
            self._undo()
        self._undo = None


def warm_up(weights: Iterable[Weight], dtype: torch.dtype, device: torch.device) -> None:
    """Unpack zeros in every format in use, and make noise, lest a pass wait for their code to be compiled."""
    smallest: dict[object, PackedInfo] = {}
    for weight in weights:
        if isinstance(weight, PackedInfo):
            known = smallest.get(weight.format.kin)
            if known is None or weight.nbytes < known.nbytes:
                smallest[weight.format.kin] = weight
    for weight in smallest.values():
        if can_slice(weight):  # all of an embedding or of a layer's experts would take hundreds of megabytes
            weight = cut(weight, 0, min(weight.shape[0], _WARM_UP_ROWS if len(weight.shape) < 3 else 1))
        zeros = {
            info.name: torch.zeros(info.shape, dtype=torch_dtype(info.dtype), device=device)
            for info in on_disk(weight)
        }
        values_of(weight, zeros, lambda count: torch.empty(count, dtype=dtype, device=device), set())
        if len(weight.shape) == 2 and isinstance(weight, PackedInfo):
            parts = {part: zeros[info.name] for part, info in weight.parts}
            rows = torch.zeros(1, weight.shape[1], dtype=dtype, device=device)
            packed_linear(rows, weight.format, parts, weight.shape)
    gumbel_row(0, 0, 1, device)  # in a compiled loop too, where the compiler was loaded for weights
