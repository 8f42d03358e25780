"""How much memory there is, and how much this process takes."""

import ctypes
from pathlib import Path

RUNTIME = 384_000_000  # bytes that Python, torch and transformers take in a process of their own, about
_RUNTIME_STEP = 32_000_000
_first_runtime = 0
MARGIN = 64 << 20  # thread stacks, the allocator's slack, Python objects made while decoding


def _status_kb(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


def resident_bytes() -> int:
    """Memory that this process holds now."""
    return _status_kb("VmRSS")


def steady_runtime(*, fresh: bool) -> int:
    """What to set aside for this process as it is without weights, in steps.

    It differs by a few megabytes from run to run; what fits must not, or every plan would be made twice. Nor
    must it grow with what an engine that was closed left on the heap, where the next one will find room:
    unless this is `fresh`, as where another engine is open, the first answer stands.
    """
    global _first_runtime
    if fresh or not _first_runtime:
        steps = -(-max(resident_bytes() - RUNTIME, 0) // _RUNTIME_STEP)
        found = RUNTIME + steps * _RUNTIME_STEP
        _first_runtime = _first_runtime or found
        return found
    return _first_runtime


def peak_bytes() -> int:
    """The most memory that this process has held since it began."""
    return _status_kb("VmHWM")


def trim() -> None:
    """Hand freed memory back to the system: what loading left behind would count against the limit."""
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
