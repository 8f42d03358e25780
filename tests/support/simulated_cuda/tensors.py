"""Tensors of a simulated device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.support.simulated_cuda.machine import machine
from tests.support.simulated_cuda.streams import Span

_EMPTY = torch.empty  # before a test replaces it
_DEVICES = [torch.device("cuda", index) for index in range(8)]


class DeviceTensor(Tensor):
    """A tensor that reports the device cuda:`index`. `host` is the same memory, accessible to the simulation.

    Only operations reach its numbers; they become tasks (`operations`).
    """

    host: Tensor
    index: int  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, host: Tensor, index: int) -> "DeviceTensor":
        made: DeviceTensor = Tensor._make_subclass(
            cls, host, False, dispatch_device=True, device_for_backend_keys=torch.device("cuda", index)
        )
        made.host, made.index = host, index
        return made

    def __init__(self, host: Tensor, index: int) -> None:
        pass  # everything is done above: torch's own takes no arguments

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        from tests.support.simulated_cuda.operations import dispatch

        with torch._C.DisableTorchFunction():  # bypasses modes of the caller
            return dispatch(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return _DEVICES[self.index]

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.cpu().numpy()
        raise TypeError("can't convert cuda device type tensor to numpy. Use Tensor.cpu() first")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.numpy()

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"{self.cpu()!r} on cuda:{self.index}"

    def record_stream(self, stream: Any) -> None:
        machine().uses(self.host.untyped_storage(), self.index, stream.queue)


@dataclass(frozen=True, slots=True)
class Operand:
    """The location of a tensor, as a kernel gets it: it keeps neither the memory nor its content alive."""

    device: int
    start: int  # bytes from the beginning of the device's memory
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: DeviceTensor) -> "Operand":
        host, device = tensor.host, machine().devices[tensor.index]
        start = device.offset(host.untyped_storage()) + host.storage_offset() * host.itemsize
        return cls(tensor.index, start if host.numel() else 0, tuple(host.shape), host.stride(), host.dtype)

    @property
    def span(self) -> Span:
        """The bytes from its first number to its last."""
        return Span(
            self.device, self.start, self.start + extent(self.size, self.stride) * self.dtype.itemsize
        )

    def tensor(self, *, alone: bool = False) -> Tensor:
        """Return the current tensor; alone: with a storage that holds nothing else."""
        allocator = machine().devices[self.device].allocator
        if not alone:
            every = allocator.bytes.view(self.dtype)
            return every.as_strided(self.size, self.stride, self.start // self.dtype.itemsize)
        if 0 in self.size:
            return _EMPTY(self.size, dtype=self.dtype)
        count = extent(self.size, self.stride)
        flat = torch.frombuffer(allocator.memory, dtype=self.dtype, count=count, offset=self.start)
        return flat.as_strided(self.size, self.stride)


def extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """Number of elements from the first to the last."""
    return 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))


def new_tensor(
    size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: int, written: bool = False
) -> DeviceTensor:
    """A NaN-filled tensor in memory of the current stream; written: the next task writes all of it."""
    with torch._C.DisableTorchFunction():
        count = extent(size, stride)
        if not count:
            return DeviceTensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"), device)
        storage = machine().allocate(count * dtype.itemsize, device, written)
        empty = _EMPTY(0, dtype=dtype, device="cpu")
        return DeviceTensor(empty.set_(storage, 0, tuple(size), tuple(stride)), device)
