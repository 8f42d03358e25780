"""torch: whether it loads, was built for this machine's driver and GPUs, and computes on each of them."""

import os
from collections.abc import Iterator

from offspec.core.config import format_bytes
from offspec.engine.doctor.driver import Driver, find_driver
from offspec.engine.doctor.finding import Asked, Figure, Finding
from offspec.engine.doctor.worker import cause_of

_PART = "torch"
_AGAIN = "install it again: pip install --force-reinstall torch"
_INDEX = "https://download.pytorch.org/whl"
# CUDA versions of drivers, and the index of the newest build that runs on them. PyPI has one for CUDA 13.
_INDEXES = (((13, 0), ""), ((12, 8), "cu128"), ((12, 0), "cu126"))
_TIGHT = 2_000_000_000  # bytes of free device memory
_KERNELS_FROM = (8, 0)  # compute capability that Triton compiles all of our types for


def check(asked: Asked) -> Iterator[Finding]:
    """One finding on torch itself, then one for each GPU that it can use."""
    try:
        import torch
    except Exception as error:  # a broken wheel fails with any of several
        yield Finding(_PART, "failed", f"it cannot be imported: {cause_of(error)}", _AGAIN)
        return
    driver = find_driver()
    usable = driver is not None and not driver.error and driver.gpus > 0
    built = torch.version.cuda
    threads = torch.get_num_threads()
    team = f"{threads} thread{'' if threads == 1 else 's'}"
    figures: dict[str, Figure] = {
        "version": torch.__version__,
        "built_for_cuda": built,
        "built_for_hip": torch.version.hip,
        "threads": threads,
        "processors": os.cpu_count(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }
    if not usable or driver is None:
        kind = "for the processor" if built is None else f"for CUDA {built}"
        found = f"{torch.__version__}, built {kind}; {team}"
        yield Finding(_PART, "ok", found, figures=figures)
        return
    wrong = _misfit(torch.__version__, built, driver) if torch.version.hip is None else None
    if wrong is None and not torch.cuda.is_available():
        wrong = f"{torch.__version__} cannot use the GPU: {_why_not()}", _install(driver)
    if wrong is not None:
        yield Finding(_PART, "failed", *wrong, figures)
        return
    yield Finding(_PART, "ok", f"{torch.__version__}, built for CUDA {built}; {team}", figures=figures)
    for index in range(torch.cuda.device_count()):
        yield _gpu(index, driver)


def _misfit(version: str, built: str | None, driver: Driver) -> tuple[str, str] | None:
    """Why this build cannot use that driver, and what to do; None where it can."""
    if built is None:
        return f"{version} is a build for the processor, and this machine has an NVIDIA GPU", _install(driver)
    if int(built.split(".")[0]) > driver.cuda[0]:
        found = f"{version} is built for CUDA {built}, and the driver is for CUDA {driver.name}"
        return found, f"update the driver, or: {_install(driver)}"
    return None


def _install(driver: Driver) -> str:
    """The line that installs a build for this driver."""
    for least, index in _INDEXES:
        if driver.cuda >= least:
            where = f" --index-url {_INDEX}/{index}" if index else ""
            return f"pip uninstall -y torch triton && pip install torch{where}"
    return "update NVIDIA's driver to release 580 or newer, then: pip install --force-reinstall torch"


def _why_not() -> str:
    import torch

    try:
        torch.cuda.init()
    except Exception as error:  # RuntimeError, AssertionError
        return cause_of(error)
    return "torch.cuda.is_available() is False"


def _gpu(index: int, driver: Driver) -> Finding:
    """Whether a GPU computes, and what it has."""
    import torch

    part, device = f"GPU {index}", torch.device("cuda", index)
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    figures: dict[str, Figure] = {
        "name": properties.name,
        "memory": properties.total_memory,
        "capability": f"{capability[0]}.{capability[1]}",
        "processors": properties.multi_processor_count,
    }
    size = format_bytes(properties.total_memory)
    card = f"{properties.name}, {size}, compute capability {figures['capability']}"
    try:
        free, _ = torch.cuda.mem_get_info(device)
        total = float(torch.arange(1000, device=device, dtype=torch.float32).sum())
    except Exception as error:  # of many classes; the first use of a device is where it fails
        known = ", ".join(torch.cuda.get_arch_list())
        found = f"{card}: {cause_of(error)} (torch has code for {known})"
        return Finding(part, "failed", found, _install(driver), figures)
    figures["free"] = free
    if total != 499500.0:
        found = f"{card}: the sum of 0 to 999 comes out as {total:g}"
        return Finding(
            part, "failed", found, "test the card; its memory or its power may be at fault", figures
        )
    if free < _TIGHT:
        found = f"{card}, of which only {format_bytes(free)} are free"
        return Finding(part, "limited", found, "close what else uses the GPU; nvidia-smi lists it", figures)
    if capability < _KERNELS_FROM and torch.version.hip is None:
        found = f"{card}: too old for our kernels, so torch's own operations are used, which are slower"
        return Finding(part, "limited", found, "a card of 2020 or later (Ampere) has them", figures)
    return Finding(part, "ok", f"{card}, {format_bytes(free)} free", figures=figures)
