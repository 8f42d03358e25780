"""Compute devices: the CPU, or CUDA devices with a memory limit."""

import os
import sys
from collections.abc import Iterable, Sequence

import torch

from offspec.core.config import AUTO
from offspec.core.errors import CapacityError, RequestError
from offspec_kernels.backend import VARIABLE, choose_backend, triton_disabled_reason
from offspec_kernels.errors import ArgumentError, PathError
from offspec_planners.measure import gpu
from offspec_planners.units import format_bytes

# Bytes of the CUDA context and libraries, which torch's allocator does not count.
RUNTIME = 700_000_000

# Bytes that the allocator counts and no plan does: library workspaces, up to 32 MiB for each of two streams,
# and reserved but unused memory, up to 115 MB in tests/plan/test_device_memory.py.
SLACK = 192_000_000


def find_device(name: str) -> torch.device:
    """Return the device with a name, CUDA devices with their index: "cuda" is cuda:0.

    Raises RequestError, also if the kernels selected by OFFSPEC_KERNELS cannot run on it.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise RequestError(f"there is no device {name!r}; use cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise RequestError(f"offspec runs on cpu and cuda, not on {name!r}")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise RequestError(f'there is no usable GPU ({gpu.usable_gpu()}); use `device="cpu"`')
        device, count = torch.device("cuda", device.index or 0), torch.cuda.device_count()
        if device.index >= count:
            raise RequestError(f"there is no {name}; this machine has {count} CUDA devices, from cuda:0 on")
        _use_expandable_segments()
    try:
        choose_backend(device)
    except (ArgumentError, PathError) as error:
        raise RequestError(str(error)) from error
    return device


def _use_expandable_segments() -> None:
    """Make torch's allocator grow its segments instead of adding new ones, unless the user configured it.

    Free blocks between used ones then cannot make reserved memory much larger than allocated memory. If the
    driver does not support this, torch ignores the setting.
    """
    given = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if sys.platform != "linux" or "expandable_segments" in given or "backend" in given:
        return
    settings = [given] if given else []
    torch._C._accelerator_setAllocatorSettings(",".join([*settings, "expandable_segments:True"]))


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait for all work that was queued on CUDA devices, on any stream and by any thread."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def missing_kernels(device: torch.device) -> str | None:
    """Return a warning if a CUDA device cannot run offspec's kernels, else None."""
    if (
        device.type != "cuda"
        or os.environ.get(VARIABLE)
        or (reason := triton_disabled_reason(device)) is None
    ):
        return None
    return f"{device} uses torch's own operations, which are slower than offspec's kernels: {reason}"


def find_devices(names: str) -> tuple[torch.device, ...]:
    """Return the devices of comma-separated names; the first holds everything but layers. "all": every GPU.

    Raises RequestError, as `find_device` does, for duplicate devices, or for the CPU together with GPUs.
    """
    if names == "all":
        first = find_device("cuda")
        return tuple(torch.device(first.type, index) for index in range(torch.cuda.device_count()))
    found = tuple(map(find_device, names.split(",")))
    if len(set(found)) < len(found):
        raise RequestError(f'`device="{names}"` names a device twice')
    if len(found) > 1 and any(device.type == "cpu" for device in found):
        raise RequestError(
            "`device` cannot combine the CPU with GPUs; to compute layers on the CPU, use `cpu_layers`"
        )
    return found


def resolve_devices(names: str) -> str:
    """Return device names with indices, "cuda:0,cuda:1" for "all"; "auto" is a usable GPU, else the CPU.

    Raises RequestError.
    """
    if names == AUTO:
        found = gpu.usable_gpu()
        return f"cuda:{found.index}" if isinstance(found, gpu.Gpu) else "cpu"
    return ",".join(map(str, find_devices(names)))


def describe_devices(devices: Sequence[torch.device]) -> str:
    """Return the devices with the names of the GPUs: "NVIDIA GeForce RTX 4090 (cuda:0)", or "the CPU"."""
    return ", ".join(
        "the CPU" if device.type == "cpu" else f"{torch.cuda.get_device_name(device)} ({device})"
        for device in devices
    )


def claim_vram(device: torch.device, vram: int | None) -> int | None:
    """Set torch's memory limit; return the total usable bytes of device memory, or None for the CPU.

    Args:
        device: The CPU or a CUDA device.
        vram: Memory limit in bytes that torch must not exceed. None: most of the free memory.

    Raises:
        CapacityError: The limit is more than the device's free memory, or less than CUDA and torch need.
    """
    if device.type == "cpu":
        return None
    if vram is not None and vram < RUNTIME + SLACK:
        raise CapacityError(
            f"{format_bytes(vram)} of device memory are not enough: CUDA and torch alone need "
            f"{format_bytes(RUNTIME + SLACK)}; use a larger `vram`",
            needed=RUNTIME + SLACK,
            given=vram,
        )
    torch.cuda.set_device(device)  # otherwise streams and graphs would be created on the first one
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    if vram is None:
        vram = int(0.95 * free) + RUNTIME  # already in use, so not counted as free
    elif vram > free + RUNTIME:
        raise CapacityError(
            f"{format_bytes(vram)} of device memory were requested, but only {format_bytes(free)} are free; "
            "close other programs that use the device, or use a smaller `vram`",
            needed=vram,
            given=free,
        )
    # Another engine of this process may hold memory already.
    most = torch.cuda.memory_reserved(device) + max(vram - RUNTIME, 1)
    torch.cuda.set_per_process_memory_fraction(min(most / total, 1.0), device)
    torch.cuda.reset_peak_memory_stats(device)
    return vram


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed: torch has an error class for devices, but only a text for CPUs."""
    refused = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return refused or isinstance(error, MemoryError | torch.OutOfMemoryError)


def peak_bytes(devices: Sequence[torch.device]) -> int:
    """Return the total peak of GPU memory since `claim_vram`, including reserved memory; 0 on a CPU."""
    gpus = [device for device in devices if device.type == "cuda"]
    return sum(RUNTIME + torch.cuda.max_memory_reserved(device) for device in gpus)
