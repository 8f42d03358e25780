"""GPUs: the state of NVIDIA's driver without torch, and whether torch computes on each. Builds no kernel."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

from offspec_planners.units import format_bytes, format_count

_PCI, _KERNEL_MODULE = Path("/sys/bus/pci/devices"), Path("/proc/driver/nvidia/version")
_INSTALL = (
    "install NVIDIA's driver (on Ubuntu: sudo ubuntu-drivers install) and restart; a container must be "
    "started with its GPUs (docker run --gpus all)"
)
# Results of cuInit, and their remedies.
_ERRORS = {
    100: (
        "it finds no GPU it is allowed to use",
        "check CUDA_VISIBLE_DEVICES and nvidia-smi; a container must be given its GPUs (--gpus all)",
    ),
    802: ("the GPUs are still being set up", "start nvidia-fabricmanager and wait until it is up"),
    803: ("its kernel module and its library have different versions", "restart the machine"),
    804: ("it is older than the CUDA libraries of this container", "update the driver of the host"),
    999: (
        "it fails without giving a reason",
        "sudo modprobe -r nvidia_uvm && sudo modprobe nvidia_uvm, or restart the machine",
    ),
}
_INDEX = "https://download.pytorch.org/whl"
# CUDA versions of drivers, and the index of the newest build that runs on them. PyPI hosts one for CUDA 13.
_INDEXES = (((13, 0), ""), ((12, 8), "cu128"), ((12, 0), "cu126"))
_TIGHT = 2_000_000_000  # bytes of free device memory
_KERNELS_FROM = (8, 0)  # minimum compute capability for all of our types in Triton


@dataclass(frozen=True, slots=True)
class Driver:
    """State of the driver's library.

    Args:
        cuda: CUDA version of the driver, such as (12, 4).
        gpus: Number of GPUs it finds.
        error: Result of its initialization; 0 on success.
    """

    cuda: tuple[int, int]
    gpus: int
    error: int = 0

    @property
    def name(self) -> str:
        return ".".join(map(str, self.cuda))


@dataclass(frozen=True, slots=True)
class Fault:
    """Reason why a GPU cannot be used.

    Args:
        found: Reason, as a clause.
        remedy: What to do about it; "" if nothing can be done.
    """

    found: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.found}; {self.remedy}" if self.remedy else self.found


def driver_fault(driver: Driver | None, cards: int) -> Fault | None:
    """Return why programs cannot reach a GPU through the driver; None if they can.

    driver: None without a driver. cards: number of cards on the bus.
    """
    if driver is None and not cards:
        return Fault("this machine has no NVIDIA GPU")
    if driver is None:
        return Fault(
            f"{format_count(cards, 'NVIDIA GPU')}, but no driver: libcuda.so.1 cannot be loaded", _INSTALL
        )
    if driver.error or not driver.gpus:
        unknown = f"it fails to start (CUDA error {driver.error})", _INSTALL
        why, remedy = _ERRORS.get(driver.error or 100, unknown)
        return Fault(f"the driver for CUDA {driver.name} does not work: {why}", remedy)
    return None


def find_driver() -> Driver | None:
    """Initialize the driver; return None if its library is missing."""
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
    """Return the number of NVIDIA display controllers on the PCI bus, with or without a driver."""
    found = 0
    for device in _PCI.glob("*"):
        try:
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
        except OSError:
            continue
        found += vendor == "0x10de" and kind.startswith("0x03")
    return found


def module_version() -> str | None:
    """Return the release of the kernel module, such as 570.86.15."""
    try:
        words = _KERNEL_MODULE.read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return None
    return next((word for word in words if word[:1].isdigit() and "." in word), None)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A CUDA device.

    Args:
        index: Index of the device, from 0.
        name: Name of the card.
        memory: Bytes of memory.
        capability: Compute capability, such as (8, 9).
        processors: Number of multiprocessors.
        free: Bytes of free memory; None if unknown.
        fault: Reason why it cannot be used at all.
        limit: Reason why it is slower, or has less memory, than possible.
    """

    index: int
    name: str
    memory: int
    capability: tuple[int, int]
    processors: int
    free: int | None = None
    fault: Fault | None = None
    limit: Fault | None = None

    @property
    def is_full(self) -> bool:
        """Whether other programs have left too little of its memory."""
        return self.free is not None and self.free < _TIGHT

    def __str__(self) -> str:
        capability = ".".join(map(str, self.capability))
        return f"{self.name}, {format_bytes(self.memory)}, compute capability {capability}"


def usable_gpu() -> Gpu | Fault:
    """Return the first GPU that works and has free memory, or why there is none."""
    import torch

    if torch.version.hip is not None:
        return Fault("offspec is tested only on NVIDIA GPUs", '`device="cuda"` tries this one')
    if not torch.cuda.is_available():
        driver = find_driver()
        fault = driver_fault(driver, cards_on_bus())
        if fault is None and driver is not None:
            fault = build_fault(driver)
        return fault or Fault("torch finds no GPU", "run `offspec doctor` for details")
    faults = list[Fault]()
    for index in range(torch.cuda.device_count()):
        gpu = try_gpu(index)
        fault = gpu.fault or (gpu.limit if gpu.is_full else None)
        if fault is None:
            return gpu
        faults.append(fault)
    return faults[0]


def build_fault(driver: Driver) -> Fault | None:
    """Return why this build of torch cannot use the GPUs of a working driver; None if it can."""
    import torch

    version, built = torch.__version__, torch.version.cuda
    if torch.version.hip is None:
        if built is None:
            found = f"torch {version} is a CPU build, but this machine has an NVIDIA GPU"
            return Fault(found, _install(driver))
        if int(built.split(".")[0]) > driver.cuda[0]:
            found = f"torch {version} is built for CUDA {built}, but the driver supports CUDA {driver.name}"
            return Fault(found, f"update the driver, or: {_install(driver)}")
    if not torch.cuda.is_available():
        return Fault(f"torch {version} cannot use the GPU: {_why_not()}", _install(driver))
    return None


def try_gpu(index: int) -> Gpu:
    """Open a CUDA device and sum some numbers to check that it computes."""
    import torch

    device = torch.device("cuda", index)
    try:
        properties = torch.cuda.get_device_properties(device)
    except Exception as error:  # another program has exclusive use, or all of its memory
        fault = Fault(
            f"GPU {index} cannot be opened: {_first_line(error)}", "run nvidia-smi to see what uses it"
        )
        return Gpu(index, f"GPU {index}", 0, (0, 0), 0, fault=fault)
    capability = (properties.major, properties.minor)
    about = (index, properties.name, properties.total_memory, capability, properties.multi_processor_count)
    card = str(Gpu(*about))
    try:
        torch.cuda.empty_cache()  # free the memory of a closed engine
        free, _ = torch.cuda.mem_get_info(device)
        total = float(torch.arange(1000, device=device, dtype=torch.float32).sum())
    except Exception as error:  # many classes; failures appear at the first use of a device
        known = ", ".join(torch.cuda.get_arch_list())
        found = f"{card}: {_first_line(error)} (torch has code for {known})"
        driver = find_driver()
        return Gpu(*about, fault=Fault(found, _install(driver) if driver else ""))
    if total != 499500.0:
        found = f"{card}: the sum of 0 to 999 is computed as {total:g}"
        fault = Fault(found, "test the card; its memory or its power may be at fault")
        return Gpu(*about, free, fault)
    return Gpu(*about, free, limit=_limit(card, free, capability))


def _limit(card: str, free: int, capability: tuple[int, int]) -> Fault | None:
    import torch

    if free < _TIGHT:
        found = f"{card}: only {format_bytes(free)} of its memory is free"
        return Fault(found, "close other programs that use the GPU (see nvidia-smi)")
    if capability < _KERNELS_FROM and torch.version.hip is None:
        found = f"{card}: too old for offspec's kernels; torch's slower operations are used"
        return Fault(found, "use a card of 2020 or later (Ampere) for full speed")
    return None


def _install(driver: Driver) -> str:
    """Return the command that installs a build for this driver."""
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
        return _first_line(error)
    return "torch.cuda.is_available() is False"


def _first_line(error: Exception) -> str:
    """Return an error's type, and the first non-empty line of its message."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
