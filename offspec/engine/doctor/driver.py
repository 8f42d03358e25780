"""NVIDIA's driver, asked without torch: whether there is a GPU, and whether programs can reach it."""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from offspec.engine.doctor.finding import Asked, Figure, Finding

_PART = "NVIDIA driver"
_PCI, _KERNEL_MODULE = Path("/sys/bus/pci/devices"), Path("/proc/driver/nvidia/version")
_INSTALL = (
    "install NVIDIA's driver (on Ubuntu: sudo ubuntu-drivers install) and restart; a container must be "
    "started with its GPUs (docker run --gpus all)"
)
# What cuInit returns, and what to do about it.
_ERRORS = {
    100: (
        "it finds no GPU that it may use",
        "look at CUDA_VISIBLE_DEVICES and nvidia-smi; a container must be given its GPUs (--gpus all)",
    ),
    802: ("the GPUs are still being set up", "start nvidia-fabricmanager, and wait for it"),
    803: ("its kernel module and its library are of different versions", "restart the machine"),
    804: ("it is older than the CUDA libraries of this container", "update the driver of the host"),
    999: (
        "it fails without saying why",
        "sudo modprobe -r nvidia_uvm && sudo modprobe nvidia_uvm, or restart the machine",
    ),
}


@dataclass(frozen=True, slots=True)
class Driver:
    """What the driver's library says.

    Args:
        cuda: The CUDA version that it is made for, such as (12, 4).
        gpus: How many GPUs it finds.
        error: What its initialisation returned; 0 where it went well.
    """

    cuda: tuple[int, int]
    gpus: int
    error: int = 0

    @property
    def name(self) -> str:
        return ".".join(map(str, self.cuda))


def check(asked: Asked) -> Iterator[Finding]:
    """One finding: the driver and the number of GPUs."""
    cards, driver, module = cards_on_bus(), find_driver(), _module_version()
    figures: dict[str, Figure] = {
        "cards": cards,
        "kernel_module": module,
        "cuda": driver.name if driver else None,
        "gpus": driver.gpus if driver else 0,
        "error": driver.error if driver else None,
    }
    if driver is None and not cards:
        yield Finding(_PART, "absent", "no NVIDIA GPU; models are computed on the processor", figures=figures)
    elif driver is None:
        found = f"{_many(cards, 'NVIDIA GPU')}, but no driver: libcuda.so.1 cannot be loaded"
        yield Finding(_PART, "failed", found, _INSTALL, figures)
    elif driver.error or not driver.gpus:
        why, remedy = _ERRORS.get(
            driver.error or 100, (f"it does not start (CUDA error {driver.error})", _INSTALL)
        )
        yield Finding(
            _PART, "failed", f"the driver for CUDA {driver.name} does not work: {why}", remedy, figures
        )
    else:
        release = f"{module}, " if module else ""
        found = f"{release}for CUDA {driver.name}; {_many(driver.gpus, 'GPU')}"
        yield Finding(_PART, "ok", found, figures=figures)


def find_driver() -> Driver | None:
    """The driver, started; None where its library is not there."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        version, count = ctypes.c_int(0), ctypes.c_int(0)
        library.cuDriverGetVersion(ctypes.byref(version))
        error = int(library.cuInit(0))
        if not error:
            library.cuDeviceGetCount(ctypes.byref(count))
    except (OSError, AttributeError):
        return None
    return Driver((version.value // 1000, version.value % 1000 // 10), count.value, error)


def cards_on_bus() -> int:
    """NVIDIA's display controllers on the PCI bus, whether they have a driver or not."""
    found = 0
    for device in _PCI.glob("*"):
        try:
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
        except OSError:
            continue
        found += vendor == "0x10de" and kind.startswith("0x03")
    return found


def _module_version() -> str | None:
    """The release of the kernel module, such as 570.86.15."""
    try:
        words = _KERNEL_MODULE.read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return None
    return next((word for word in words if word[:1].isdigit() and "." in word), None)


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
