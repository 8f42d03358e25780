"""NVIDIA's driver, asked without torch: whether there is a GPU, and whether programs can reach it."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

from offspec_planners.units import format_count

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


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a GPU cannot be used.

    Args:
        found: The reason, in a clause.
        remedy: What to do about it; "" where there is nothing to do.
    """

    found: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.found}; {self.remedy}" if self.remedy else self.found


def driver_fault(driver: Driver | None, cards: int) -> Fault | None:
    """Why programs reach no GPU by the driver; None where they reach one.

    driver: None where there is none. cards: on the bus.
    """
    if driver is None and not cards:
        return Fault("this machine has no NVIDIA GPU")
    if driver is None:
        return Fault(
            f"{format_count(cards, 'NVIDIA GPU')}, but no driver: libcuda.so.1 cannot be loaded", _INSTALL
        )
    if driver.error or not driver.gpus:
        unknown = f"it does not start (CUDA error {driver.error})", _INSTALL
        why, remedy = _ERRORS.get(driver.error or 100, unknown)
        return Fault(f"the driver for CUDA {driver.name} does not work: {why}", remedy)
    return None


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


def module_version() -> str | None:
    """The release of the kernel module, such as 570.86.15."""
    try:
        words = _KERNEL_MODULE.read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return None
    return next((word for word in words if word[:1].isdigit() and "." in word), None)
