"""How much memory there is, how much this process takes, and how a promise of memory is divided."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

from offspec.config import format_bytes
from offspec.errors import CapacityError
from offspec_planners.placement import Placement, TooSmallError, place_layers

MARGIN = 64 << 20  # thread stacks, the allocator's slack, Python objects made while decoding


def _status_kb(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


def resident_bytes() -> int:
    """Memory that this process holds now."""
    return _status_kb("VmRSS")


def peak_bytes() -> int:
    """The most memory that this process has held since it began."""
    return _status_kb("VmHWM")


def trim() -> None:
    """Hand freed memory back to the system: what loading left behind would count against the promise."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return  # another C library; nothing is lost but the slack


def available_bytes() -> int:
    """Memory that could still be taken: what the machine has free, and what a cgroup leaves of it."""
    free = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    for limit_file, usage_file in _limit_files():
        try:
            limit, usage = limit_file.read_text().strip(), usage_file.read_text().strip()
        except OSError:
            continue
        if limit != "max":
            free = min(free, max(int(limit) - int(usage), 0))
    return free


def _limit_files() -> list[tuple[Path, Path]]:
    """(limit, usage) files of this process's control groups, version 1 and 2."""
    root, files = Path("/sys/fs/cgroup"), list[tuple[Path, Path]]()
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return files
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            folder = root / group.lstrip("/")
            files.append((folder / "memory.max", folder / "memory.current"))
        elif "memory" in controllers.split(","):
            folder = root / "memory" / group.lstrip("/")
            files.append((folder / "memory.limit_in_bytes", folder / "memory.usage_in_bytes"))
    return files


# Page tables, buffers of the kernel and the pages of libraries count against a control group as well. A
# process that fills its limit to the last page spends its time reading its own code back in.
_KERNEL_SHARE = 0.06


@dataclass(frozen=True, slots=True)
class Needs:
    """What must fit, in bytes. runtime is the process itself before any weights are read."""

    runtime: int
    rest: int
    caches: int
    scratch: int
    draft: int
    layers: list[int]
    extra: list[int]

    @property
    def fixed(self) -> int:
        return self.runtime + self.rest + self.caches + self.scratch + self.draft + MARGIN


def divide(memory: int, needs: Needs) -> Placement:
    """Place the layers into what the fixed parts leave of `memory`. Raises CapacityError."""
    try:
        return place_layers(needs.layers, needs.extra, int(memory * (1 - _KERNEL_SHARE)) - needs.fixed)
    except TooSmallError as error:
        least = int((needs.fixed + error.needed) / (1 - _KERNEL_SHARE)) + 2
        parts = {
            "Python and libraries": needs.runtime + MARGIN,
            "head and norms": needs.rest,
            "KV caches": needs.caches,
            "activations": needs.scratch,
            "the draft": needs.draft,
            "two layers": error.needed,
            "the kernel": least - needs.fixed - error.needed,
        }
        listing = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
        raise CapacityError(
            f"{format_bytes(memory)} of memory is too little: the least that would do is "
            f"{format_bytes(-(-least // 10**7) * 10**7)} ({listing})",
            needed=least,
            given=memory,
        ) from None
