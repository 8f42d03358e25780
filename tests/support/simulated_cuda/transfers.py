"""Copies: within a device, between two, and to and from host memory, pinned or not."""

from typing import Any

import torch
from torch import Tensor

from tests.support.simulated_cuda.errors import SimulatedCudaError
from tests.support.simulated_cuda.machine import machine
from tests.support.simulated_cuda.streams import Span, Task
from tests.support.simulated_cuda.tensors import DeviceTensor, Operand, new_tensor


def copy(into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Run into.copy_(source), with one of them on a device."""
    if isinstance(into, DeviceTensor):
        if isinstance(source, DeviceTensor):
            _across(into, source)
        else:
            _down(into, source, non_blocking)
    else:
        assert isinstance(source, DeviceTensor)
        _up(into, source, non_blocking)
    return into


def to_copy(
    source: DeviceTensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    """Run source.to(...), always with a copy."""
    like = torch.empty_strided(source.shape, source.stride(), dtype=dtype or source.dtype, device="meta")
    like = torch.empty_like(like, memory_format=memory_format or torch.preserve_format)
    target = source.device if device is None else torch.device(device)
    if target.type == "meta":
        return like
    if target.type == "cuda":
        index = machine().device if target.index is None else target.index
        return copy(new_tensor(like.shape, like.stride(), like.dtype, index), source, non_blocking)
    # As torch does, use pinned memory if it need not wait, and convert on the device.
    converted = source if like.dtype == source.dtype else to_copy(source, dtype=like.dtype)
    with torch._C.DisableTorchFunction():
        out = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
    _up(out, converted, non_blocking, pinned=non_blocking)
    return out


def to_device(source: Tensor, index: int, cause: str = "copy to device") -> DeviceTensor:
    """Copy a tensor of the host while it waits."""
    made = new_tensor(source.shape, source.stride(), source.dtype, index)
    _down(made, source, False, cause)
    return made


def put(numbers: Tensor, index: int) -> DeviceTensor:
    """Place a result on the device that was computed while the host waited."""
    made = new_tensor(numbers.shape, numbers.stride(), numbers.dtype, index)
    place = Operand.of(made)
    machine().launch("put", lambda: place.tensor().copy_(numbers), index, counted=0)
    return made


def _across(into: DeviceTensor, source: DeviceTensor) -> None:
    """Copy on one device as an ordinary task. Between two, the source's runs it and both streams wait."""
    of, place, origin = machine(), Operand.of(into), Operand.of(source)

    def run() -> None:
        place.tensor().copy_(origin.tensor())

    if into.index == source.index:
        of.launch("copy", run, into.index, spans=(place.span, origin.span))
        return
    of.copied["device to device"] += source.nbytes
    here, there = of.current_queue(source.index), of.current_queue(into.index)
    of.scheduler.submit(here, Task("wait for the other device", None, there.end))
    of.launch("copy between devices", run, source.index, spans=(place.span, origin.span))
    of.scheduler.submit(there, Task("wait for the other device", None, here.end))


def _down(into: DeviceTensor, source: Tensor, non_blocking: bool, cause: str = "copy to device") -> None:
    of, place = machine(), Operand.of(into)
    of.copied["host to device"] += source.nbytes
    later = non_blocking and source.is_pinned() and source.dtype == into.dtype and source.is_contiguous()
    if not later:  # unpinned memory has been read when the call returns, and cannot be captured
        of.forbid_in_capture(cause)
        source = source.detach().clone()
    if source.dim() and into.dim() < source.dim():
        raise SimulatedCudaError(f"{list(source.shape)} does not fit into {list(into.shape)}")
    with torch._C.DisableTorchFunction():
        origin = source.detach()
    spans = (place.span, _span_of(origin)) if later else (place.span,)
    of.launch(cause, lambda: place.tensor().copy_(origin), into.index, spans=spans)
    if not non_blocking:
        of.host_waits(cause, [of.current_queue(into.index).end])


def _up(into: Tensor, source: DeviceTensor, non_blocking: bool, pinned: bool = False) -> None:
    of, origin = machine(), Operand.of(source)
    of.copied["device to host"] += source.nbytes
    with torch._C.DisableTorchFunction():
        place = into.detach()
    if of.scheduler.policy == "sizes":
        place.zero_()
    spans = (origin.span, _span_of(place))
    of.launch("copy to host", lambda: place.copy_(origin.tensor()), source.index, spans=spans)
    if not (non_blocking and (pinned or into.is_pinned())):
        of.host_waits("copy to host", [of.current_queue(source.index).end])


def _span_of(tensor: Tensor) -> Span:
    """Bytes of a host tensor without gaps."""
    return Span(None, tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
