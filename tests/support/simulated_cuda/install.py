"""Installs the simulated machine below torch.cuda, whose own code and checks stay."""

import ctypes
import importlib
import os
import types
import weakref
from typing import Any

import torch
from torch import Tensor

from tests.support.simulated_cuda import operations, transfers
from tests.support.simulated_cuda.graphs import GraphBase
from tests.support.simulated_cuda.handles import EventBase, StreamBase, is_capturing
from tests.support.simulated_cuda.machine import Machine, install, machine
from tests.support.simulated_cuda.streams import Span
from tests.support.simulated_cuda.tensors import DeviceTensor

_CUDA, _SPARE = 1, 20  # numbers of device kinds in torch: CUDA's, and the one that Python can add
_FACTORIES = (
    "arange", "arange.start", "arange.start_step", "eye", "eye.m", "linspace", "randn", "rand",
    "randint", "randint.low", "randperm",
)  # fmt: skip
_libraries: list[Any] = []


def install_machine(policy: str = "eager", total: int = 2 << 30, devices: int = 2) -> Machine:
    """Give this torch CUDA devices until the process ends.

    Args:
        policy: One of `streams.POLICIES`.
        total: Bytes of memory of each device.
        devices: Number of devices.
    """
    assert torch.version.cuda is None, "this torch has a CUDA of its own"
    made = Machine(policy, total, devices)
    install(made)
    _replace_bindings(made)
    _register_device_guard()
    _register_operations()
    _register_pinning()
    return made


def _replace_bindings(of: Machine) -> None:
    """Replace the functions and classes that torch.cuda calls, and the classes derived from them."""
    bindings: dict[str, Any] = {
        "_has_cuda": True,
        "_CudaStreamBase": StreamBase,
        "_CudaEventBase": EventBase,
        "_CUDAGraph": GraphBase,
        "_graph_pool_handle": of.new_pool,
        "_cuda_isCurrentStreamCapturing": is_capturing,
        "_cuda_init": lambda: None,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_getDeviceCount": lambda: len(of.devices),
        "_cuda_getDevice": lambda: of.device,
        "_cuda_setDevice": _exchange,
        "_cuda_getCurrentStream": lambda index: (of.current_queue(_own(index)).number, _own(index), _CUDA),
        "_cuda_getDefaultStream": lambda index: (0, _own(index), _CUDA),
        "_cuda_setStream": _set_stream,
        "_cuda_synchronize": _synchronize,
        "_cuda_setMemoryFraction": _set_fraction,
        "_cuda_emptyCache": _empty_cache,
        "_cuda_memoryStats": _statistics,
        "_cuda_resetPeakMemoryStats": lambda index: of.devices[index].allocator.reset_peaks(),
        "_cuda_canDeviceAccessPeer": lambda index, other: True,
        "_cuda_getCurrentRawStream": lambda index: of.current_queue(index).number,
        "_host_emptyCache": lambda: None,
    }
    for name, value in bindings.items():
        setattr(torch._C, name, value)
    for module in (torch.cuda.streams, torch.cuda.graphs):
        importlib.reload(module)
    cuda: Any = torch.cuda
    for module, names in (
        (torch.cuda.streams, ("Stream", "Event", "ExternalStream")),
        (torch.cuda.graphs, ("CUDAGraph", "graph", "graph_pool_handle", "is_current_stream_capturing")),
    ):
        for name in names:
            setattr(cuda, name, getattr(module, name))
    cuda._initialized, cuda._cached_device_count = True, len(of.devices)
    cuda._is_in_bad_fork = lambda: False
    cuda._exchange_device = cuda._maybe_exchange_device = _exchange
    cuda._get_device_properties = lambda index: _properties(of)
    cuda._cudart = _Runtime()
    cuda.is_bf16_supported = lambda including_emulation=True: True
    cuda.manual_seed = cuda.manual_seed_all = lambda seed: None


def _own(index: int) -> int:
    return machine().device if index < 0 else index


def _exchange(index: int) -> int:
    before = machine().device
    if index >= 0:
        machine().device = index
    return before


def _set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    machine().select(machine().devices[device_index].streams[stream_id])


def _synchronize() -> None:
    of = machine()
    of.host_waits("cuda.synchronize", [queue.end for queue in of.devices[of.device].streams])


def _set_fraction(fraction: float, index: int) -> None:
    allocator = machine().devices[index].allocator
    allocator.limit = int(fraction * allocator.total)


def _empty_cache() -> None:
    machine().release()


def _statistics(index: int) -> dict[str, Any]:
    allocator = machine().devices[index].allocator
    return {
        f"{name}_bytes": {
            "all": {
                "current": getattr(allocator.now, figure),
                "peak": getattr(allocator.peak, figure),
                "allocated": 0,
                "freed": 0,
            }
        }
        for name, figure in (("requested", "asked"), ("allocated", "allocated"), ("reserved", "reserved"))
    }


def _properties(of: Machine) -> Any:
    return types.SimpleNamespace(
        name="simulated",
        major=8,
        minor=9,
        total_memory=of.devices[0].allocator.total,
        multi_processor_count=4,
        shared_memory_per_block_optin=99 << 10,
        warp_size=32,
        L2_cache_size=1 << 20,
    )


class _Runtime:
    """Replaces torch.cuda.cudart()."""

    class cudaError:
        success = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        pinned = machine().pinned
        if any(first < address + size and address < first + room for first, room in pinned.items()):
            return machine().record_error(712)  # already registered
        pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        size = machine().pinned.pop(address, None)
        if size is None:
            return machine().record_error(713)
        machine().check_given_back(Span(None, address, address + size))
        return 0

    def cudaMemGetInfo(self, index: int) -> tuple[int, int]:
        allocator = machine().devices[index].allocator
        return allocator.total - allocator.now.reserved, allocator.total

    def cudaGetErrorString(self, error: int) -> str:
        return f"CUDA error {error}"


def _register_device_guard() -> None:
    """Register a device guard. torch for CPUs has none for CUDA; the one that Python may add replaces it."""

    class Guard(torch._C._acc.DeviceGuard):
        def type_(self) -> Any:
            return torch._C._autograd.DeviceType.CUDA

    guard = Guard()
    _libraries.append(guard)
    torch._C._acc.register_python_privateuseone_device_guard(guard)
    library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
    table = (ctypes.c_void_p * (_SPARE + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    assert table[_SPARE] and not table[_CUDA], "torch keeps its device guards elsewhere"
    table[_CUDA], table[_SPARE] = table[_SPARE], None


def _register_operations() -> None:
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", operations.empty, "CUDA")
    library.impl("empty_strided", operations.empty_strided, "CUDA")
    for name in _FACTORIES:
        packet, _, overload = name.partition(".")
        func = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(name, operations.factory(func), "CUDA")
    # Operations that C++ calls directly, bypassing the class of the tensor.
    library.impl("copy_", transfers.copy, "CUDA")
    others = torch.library.Library("_", "IMPL")
    others.fallback(lambda func, *args, **kwargs: operations.dispatch(func, args, kwargs), "CUDA")
    _libraries.extend((library, others))


def _register_pinning() -> None:
    """Mark copies of host tensors as pinned on request; torch built for CPUs would refuse."""

    def pin(tensor: Tensor) -> Tensor:
        machine().pinned[tensor.data_ptr()] = tensor.nbytes
        weakref.finalize(tensor, machine().pinned.pop, tensor.data_ptr(), None)
        return tensor

    tensors: Any = Tensor
    tensors.pin_memory = lambda tensor, device=None: pin(tensor.clone())
    tensors.is_pinned = lambda tensor, device=None: (
        not isinstance(tensor, DeviceTensor) and machine().is_pinned(tensor)
    )
