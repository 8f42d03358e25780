"""Unpacking of packed weights just before their module runs, in memory shared by all modules.

A packed weight is kept in memory in its stored format. Its values are unpacked when its module is about to
run and dropped afterwards, so there is never more than one module's values.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from offspec.checkpoint.tensors import (
    PackedInfo,
    TensorInfo,
    Weight,
    can_slice,
    slice_rows,
    stored_tensors,
    torch_dtype,
)
from offspec.core.errors import CheckpointError
from offspec.model.patches import wrap
from offspec.stream.arena import Arena
from offspec.stream.layout import UnitLayout
from offspec_kernels.dequant import dequantize
from offspec_kernels.errors import ArgumentError
from offspec_kernels.noise import gumbel_row
from offspec_kernels.packed_linear import packed_linear

_WARM_UP_ROWS = 64  # a multiple of 16, as in weights: Triton compiles other sizes separately
_REMEDY = "download the model, or pack it, again"


def is_read_directly(name: str) -> bool:
    """Return whether layers read the matrix of this name without running its module, as in Mamba."""
    return name.endswith("dt_proj.weight")


class Scratch:
    """Workspace used as a stack, because a module may run inside another.

    `taken` is the number of values in use; a caller of `take` resets it afterwards.

    Args:
        elements: Number of values. If more are taken, they are allocated temporarily.
        dtype: Dtype of the values.
        device: Device of the workspace.
    """

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        if device.type == "cpu":  # in huge pages, if the system supports them
            self._memory = Arena(elements * dtype.itemsize).tensor.view(dtype)[:elements]
        else:
            self._memory = torch.empty(elements, dtype=dtype, device=device)
        self.taken = 0

    def take(self, elements: int) -> torch.Tensor:
        """Return uninitialized memory [elements]."""
        start = self.taken
        self.taken += elements
        if self.taken > len(self._memory):
            return self._memory.new_empty(elements)
        return self._memory[start : self.taken]

    def lend(self, elements: int) -> torch.Tensor:
        """Return uninitialized memory [elements] that is valid until the next `take` or `lend`."""
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
    """Return a weight's values from memory (uint8, [slot bytes]) that holds its unit; see `values_of`."""
    views = {info.name: view_in(memory, layout, info) for info in stored_tensors(weight)}
    return values_of(weight, views, out, known)


def view_in(memory: torch.Tensor, layout: UnitLayout, tensor: TensorInfo) -> torch.Tensor:
    """Return a tensor inside a slot as a view, or as a copy if its offset is not aligned to its dtype."""
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
    """Return a weight's values: the stored tensor itself, or its unpacked values.

    Args:
        weight: Plain or packed weight.
        views: Stored tensors of the weight by name.
        out: Returns memory for a number of values, if the weight is packed.
        known: Packed weights already checked to have finite values; this weight is added.

    Raises:
        CheckpointError: The parts cannot be unpacked, or give NaN or infinite values, as damaged scales do.
    """
    if not isinstance(weight, PackedInfo):
        return views[weight.name]
    parts = {part: views[info.name] for part, info in weight.parts}
    try:
        values = dequantize(weight.format, parts, weight.shape, out(math.prod(weight.shape)))
    except ArgumentError as error:
        raise CheckpointError(
            f"{weight.name} in {weight.file} cannot be unpacked: {error}; {_REMEDY}"
        ) from error
    if weight not in known:
        if not bool(torch.isfinite(values.sum(dtype=torch.float32))):  # NaN and infinity survive any sum
            raise CheckpointError(
                f"{weight.name} in {weight.file} has NaN or infinite values: the file is damaged; {_REMEDY}"
            )
        known.add(weight)
    return values


class ModuleUnpacker:
    """Binds the unpacked weights of one module while it runs.

    Args:
        module: Module with packed weights.
        elements: Total number of unpacked values.
        make: make(out) returns the parameters by name, with values in memory from out(elements).
        put: put(tensors) binds the parameters.
        drop: drop() restores the previous parameters.
        product: product(input) returns the module's output without unpacking a whole weight, or None if that
            is not possible.
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
    """Unpack zeros in every format in use, and draw noise, so that no pass has to wait for compilation."""
    smallest: dict[object, PackedInfo] = {}
    for weight in weights:
        if isinstance(weight, PackedInfo):
            known = smallest.get(weight.format.base_format)
            if known is None or weight.nbytes < known.nbytes:
                smallest[weight.format.base_format] = weight
    for weight in smallest.values():
        if can_slice(weight):  # a whole embedding or a layer's experts would take hundreds of megabytes
            weight = slice_rows(
                weight, 0, min(weight.shape[0], _WARM_UP_ROWS if len(weight.shape) < 3 else 1)
            )
        zeros = {
            info.name: torch.zeros(info.shape, dtype=torch_dtype(info.dtype), device=device)
            for info in stored_tensors(weight)
        }
        values_of(weight, zeros, lambda count: torch.empty(count, dtype=dtype, device=device), set())
        if len(weight.shape) == 2 and isinstance(weight, PackedInfo):
            parts = {part: zeros[info.name] for part, info in weight.parts}
            rows = torch.zeros(1, weight.shape[1], dtype=dtype, device=device)
            packed_linear(rows, weight.format, parts, weight.shape)
    gumbel_row(0, 0, 1, device)  # also compiled if the compiler was loaded for weights
