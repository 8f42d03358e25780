"""Measurement of a machine. The only part of the planners that needs torch, which it imports when called."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from offspec_planners.hardware_rates import Hardware, Identity, Processor
from offspec_planners.measure.disk import disk_rate
from offspec_planners.measure.processor import copy_bandwidth, gemm_rates, layer_overhead, memory_bandwidth

if TYPE_CHECKING:
    from offspec_planners.measure.processor import Product

_ROWS = {"cpu": (1, 4, 16, 64, 256, 1024), "cuda": (1, 4, 16, 64, 256, 1024, 4096)}
_HOST_ROWS = (1, 16, 64, 256)  # next to a device, a CPU processes few rows
_SIDE = 4096  # size of the square matrices
_SECONDS = 0.25  # per number of rows

Progress = Callable[[str, int, int], None]
"""Called with the next measurement, the number of finished measurements, and the total."""


def identify(device: str = "cpu") -> Identity:
    """Return the identity of this machine that `measure` would record, without measuring."""
    import torch

    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    place = torch.device(device)
    waits = ""
    if place.type == "cuda":
        chip = torch.cuda.get_device_name(place)
        memory = torch.cuda.get_device_properties(place).total_memory
    else:
        threads = torch.get_num_threads()
        chip, memory = _joined(_cpu_name(), f"{threads} thread{'s' if threads > 1 else ''}"), ram
        waits = wait_policy() if threads > 1 else ""
    name = _joined(
        chip, f"{ram / 1e9:.0f} GB RAM"
    )  # without settings, which are part of the processor's name
    return Identity(name, ram, _joined(chip, waits), memory, place.type != "cpu")


def _joined(*parts: str) -> str:
    return ", ".join(filter(None, parts))


def wait_policy() -> str:
    """Return OpenMP's wait policy variables; "" for libgomp's default."""
    names = (name for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT") if os.environ.get(name))
    return ", ".join(f"{name}={os.environ[name]}" for name in names)


def measure(
    disk_files: Sequence[Path],
    device: str = "cpu",
    progress: Progress = lambda what, done, total: None,
    product: Product | None = None,
) -> Hardware:
    """Measure this machine; takes about seven seconds, plus one for the CPU next to a device.

    Takes up to 200 MB of RAM, or 1.1 GB of the device's memory and 256 MB of pinned RAM.

    Args:
        disk_files: Files on the disk to measure, 256 MB or more.
        device: Device that computes, "cpu" or "cuda".
        progress: Called with the next measurement and the progress.
        product: Product used by passes. Default torch's.

    Raises:
        OSError: The files cannot be read.
    """
    which = identify(device)
    steps = ["disk", "memory", *(["link", "the CPU"] if which.has_own_memory else []), "products", "launches"]

    def begin(what: str) -> None:
        progress(what, steps.index(what), len(steps))

    begin("disk")
    disk = disk_rate(disk_files)
    begin("memory")
    memory = memory_bandwidth(device)
    link = host = None
    if which.has_own_memory:
        begin("link")
        link = copy_bandwidth(device)
        begin("the CPU")
        host = measure_host(product)
    begin("products")
    rows = _ROWS["cuda" if which.has_own_memory else "cpu"]
    gemm = gemm_rates(
        rows,
        rows=_SIDE,
        columns=_SIDE,
        dtype="bfloat16",
        seconds=_SECONDS,
        device=device,
        product=product,
    )
    begin("launches")
    overhead = float(f"{layer_overhead(device):.3g}")
    progress("done", len(steps), len(steps))
    processor = Processor(which.processor, which.memory, memory, gemm, overhead)
    return Hardware(which.name, which.ram, disk, link, processor, host=host)


def measure_host(product: Product | None = None) -> Processor:
    """Measure the CPU and its RAM alone; about a second, up to 200 MB. product: as for `measure`."""
    which, seconds = identify("cpu"), _SECONDS / 3
    gemm = gemm_rates(
        _HOST_ROWS, rows=_SIDE, columns=_SIDE, dtype="bfloat16", seconds=seconds, product=product
    )
    overhead = float(f"{layer_overhead('cpu', seconds):.3g}")
    return Processor(which.processor, which.memory, memory_bandwidth("cpu", seconds / 5), gemm, overhead)


def _cpu_name() -> str:
    """Return the processor's own name."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return os.uname().machine  # not reported by all non-x86 processors
