"""What is computed on: the CPU, or a CUDA device with memory of its own and a limit of it."""

import os
import sys
from collections.abc import Sequence

import torch

from offspec.core.config import AUTO
from offspec.core.errors import CapacityError, RequestError
from offspec_kernels.backend import VARIABLE, choose_backend, refusal
from offspec_kernels.errors import ArgumentError, PathError
from offspec_planners.measure import gpu
from offspec_planners.units import format_bytes

# What a process takes on a CUDA device before its first tensor, which torch's allocator does not count.
RUNTIME = 700_000_000

# What it does count and no plan does: work space of libraries, up to 32 MiB for each of two streams; and what
# is set aside and not in use, up to 115 MB in tests/plan/test_device_memory.py.
SLACK = 192_000_000


def find_device(name: str) -> torch.device:
    """The device of that name, a CUDA device with its index: "cuda" is cuda:0.

    Raises RequestError, also for OFFSPEC_KERNELS that cannot run on it.
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
    """Have torch's allocator grow segments instead of making new ones, unless the user set it up otherwise.

    A free block between two that are in use can then not make the memory that is set aside outgrow what is
    asked for by much. Where the driver cannot do it, torch goes on as before.
    """
    given = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if sys.platform != "linux" or "expandable_segments" in given or "backend" in given:
        return
    settings = [given] if given else []
    torch._C._accelerator_setAllocatorSettings(",".join([*settings, "expandable_segments:True"]))


def missing_kernels(device: torch.device) -> str | None:
    """What the user should know of a CUDA device that runs none of our kernels; None where it does."""
    if device.type != "cuda" or os.environ.get(VARIABLE) or (reason := refusal(device)) is None:
        return None
    return f"{device} computes with torch's own operations, which takes longer: {reason}"


def find_devices(names: str) -> tuple[torch.device, ...]:
    """The devices of these names, joined by commas; the first has what is no layer. "all": every GPU.

    Raises RequestError, as `find_device`, and for a device that is named twice, or a CPU beside others.
    """
    if names == "all":
        first = find_device("cuda")
        return tuple(torch.device(first.type, index) for index in range(torch.cuda.device_count()))
    found = tuple(map(find_device, names.split(",")))
    if len(set(found)) < len(found):
        raise RequestError(f'`device="{names}"` names a device twice; once is enough')
    if len(found) > 1 and any(device.type == "cpu" for device in found):
        raise RequestError(
            "`device` takes the CPU alone: for layers on it beside a GPU there is `cpu_layers`"
        )
    return found


def resolve(names: str) -> str:
    """The same devices by name and index, "cuda:0,cuda:1" for "all"; "auto" is a usable GPU, else the CPU.

    Raises RequestError.
    """
    if names == AUTO:
        found = gpu.usable_gpu()
        return f"cuda:{found.index}" if isinstance(found, gpu.Gpu) else "cpu"
    return ",".join(map(str, find_devices(names)))


def described(devices: Sequence[torch.device]) -> str:
    """Devices by the names of their cards: "NVIDIA GeForce RTX 4090 (cuda:0)", or "the CPU"."""
    return ", ".join(
        "the CPU" if device.type == "cpu" else f"{torch.cuda.get_device_name(device)} ({device})"
        for device in devices
    )


def claim(device: torch.device, vram: int | None) -> int | None:
    """Bytes of device memory that may be used in all; None for the CPU, which has only RAM.

    Args:
        device: The CPU, or a CUDA device.
        vram: Memory limit in bytes, which torch is kept within. None: most of what is free.

    Raises:
        CapacityError: The limit is more than the device has free, or less than CUDA and torch take.
    """
    if device.type == "cpu":
        return None
    if vram is not None and vram < RUNTIME + SLACK:
        raise CapacityError(
            f"{format_bytes(vram)} of device memory are less than CUDA and torch take before any weight, "
            f"{format_bytes(RUNTIME + SLACK)}; give a larger `vram`",
            needed=RUNTIME + SLACK,
            given=vram,
        )
    torch.cuda.set_device(device)  # or streams and graphs would be made on the first one
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    if vram is None:
        vram = int(0.95 * free) + RUNTIME  # which is taken by now, so not free
    elif vram > free + RUNTIME:
        raise CapacityError(
            f"{format_bytes(vram)} of device memory were asked for, and {format_bytes(free)} are free; close "
            "what else uses the device, or give a smaller `vram`",
            needed=vram,
            given=free,
        )
    # Another engine of this process may hold memory already.
    most = torch.cuda.memory_reserved(device) + max(vram - RUNTIME, 1)
    torch.cuda.set_per_process_memory_fraction(min(most / total, 1.0), device)
    torch.cuda.reset_peak_memory_stats(device)
    return vram


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation was refused: torch has a class for a device that is full, and words for a CPU."""
    refused = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return refused or isinstance(error, MemoryError | torch.OutOfMemoryError)


def peak_bytes(devices: Sequence[torch.device]) -> int:
    """The most memory of GPUs held since `claim`, what was set aside included; 0 on a CPU."""
    gpus = [device for device in devices if device.type == "cuda"]
    return sum(RUNTIME + torch.cuda.max_memory_reserved(device) for device in gpus)
