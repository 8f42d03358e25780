"""Check of torch: whether it loads, fits this machine's driver and GPUs, and computes on each GPU."""

import os
from collections.abc import Iterator

from offspec.engine.doctor.finding import DoctorOptions, Figure, Finding
from offspec.engine.doctor.worker import cause_of
from offspec_planners.measure.gpu import Gpu, build_fault, find_driver, try_gpu
from offspec_planners.units import format_bytes

_PART = "torch"
_AGAIN = "reinstall torch: pip install --force-reinstall torch"


def check(options: DoctorOptions) -> Iterator[Finding]:
    """Yield one finding on torch, then one for each GPU that it can use."""
    try:
        import torch
    except Exception as error:  # a broken wheel raises various types
        yield Finding(_PART, "failed", f"cannot be imported: {cause_of(error)}", _AGAIN)
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
        kind = "for the CPU" if built is None else f"for CUDA {built}"
        found = f"{torch.__version__}, built {kind}; {team}"
        yield Finding(_PART, "ok", found, figures=figures)
        return
    if (fault := build_fault(driver)) is not None:
        yield Finding(_PART, "failed", fault.found, fault.remedy, figures)
        return
    yield Finding(_PART, "ok", f"{torch.__version__}, built for CUDA {built}; {team}", figures=figures)
    for index in range(torch.cuda.device_count()):
        yield _judged(try_gpu(index))


def _judged(gpu: Gpu) -> Finding:
    """Return a finding on a tested GPU."""
    figures: dict[str, Figure] = {
        "name": gpu.name,
        "memory": gpu.memory,
        "capability": ".".join(map(str, gpu.capability)),
        "processors": gpu.processors,
    }
    if gpu.free is not None:
        figures["free"] = gpu.free
    part = f"GPU {gpu.index}"
    if gpu.fault is not None:
        return Finding(part, "failed", gpu.fault.found, gpu.fault.remedy, figures)
    if gpu.limit is not None:
        return Finding(part, "limited", gpu.limit.found, gpu.limit.remedy, figures)
    return Finding(part, "ok", f"{gpu}, {format_bytes(gpu.free or 0)} free", figures=figures)
