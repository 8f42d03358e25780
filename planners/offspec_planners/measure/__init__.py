"""Measuring a machine. The only part of the planners that needs torch, and loads it when it is called."""

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
_HOST_ROWS = (1, 16, 64, 256)  # beside a device a CPU is for few rows
_SIDE = 4096  # of the square matrices that are multiplied with
_SECONDS = 0.25  # for each number of rows

Progress = Callable[[str, int, int], None]
"""Takes what is measured next, and how many measurements are done, of how many in all."""


def identify(device: str = "cpu") -> Identity:
    """Which machine this is, as `measure` would name it, without measuring."""
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
    name = _joined(chip, f"{ram / 1e9:.0f} GB RAM")  # without settings, which the processor has
    return Identity(name, ram, _joined(chip, waits), memory, place.type != "cpu")


def _joined(*parts: str) -> str:
    return ", ".join(filter(None, parts))


def wait_policy() -> str:
    """How OpenMP's threads are told to wait for each other; "" for libgomp's default."""
    names = (name for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT") if os.environ.get(name))
    return ", ".join(f"{name}={os.environ[name]}" for name in names)


def measure(
    disk_files: Sequence[Path],
    device: str = "cpu",
    progress: Progress = lambda what, done, total: None,
    product: Product | None = None,
) -> Hardware:
    """Measure this machine; some seven seconds, and one more where a CPU lies beside the device.

    Takes up to 200 MB of RAM, or 1.1 GB of the device's memory and 256 MB of pinned RAM.

    Args:
        disk_files: Files of the disk to read, 256 MB or more.
        device: "cpu" or "cuda", what computes.
        progress: Called with what is measured next and how far it is.
        product: Function that passes multiply with. Default torch's.

    Raises:
        OSError: The files cannot be read.
    """
    which = identify(device)
    steps = ["disk", "memory", *(["link", "the CPU"] if which.apart else []), "products", "launches"]

    def begin(what: str) -> None:
        progress(what, steps.index(what), len(steps))

    begin("disk")
    disk = disk_rate(disk_files)
    begin("memory")
    memory = memory_bandwidth(device)
    link = host = None
    if which.apart:
        begin("link")
        link = copy_bandwidth(device)
        begin("the CPU")
        host = measure_host(product)
    begin("products")
    rows = _ROWS["cuda" if which.apart else "cpu"]
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
    """Measure the CPU and its RAM alone; about a second. Takes up to 200 MB. product: as for `measure`."""
    which, seconds = identify("cpu"), _SECONDS / 3
    gemm = gemm_rates(
        _HOST_ROWS, rows=_SIDE, columns=_SIDE, dtype="bfloat16", seconds=seconds, product=product
    )
    overhead = float(f"{layer_overhead('cpu', seconds):.3g}")
    return Processor(which.processor, which.memory, memory_bandwidth("cpu", seconds / 5), gemm, overhead)


def _cpu_name() -> str:
    """What the processor calls itself."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return os.uname().machine  # processors that are not x86 need not say
