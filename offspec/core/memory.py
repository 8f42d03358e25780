"""How much memory there is, and how much this process takes."""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

RUNTIME = 384_000_000  # bytes that Python, torch and transformers take in a process of their own, about
_RUNTIME_STEP = 32_000_000
_first_runtime = 0
MARGIN = 64 << 20  # thread stacks, the allocator's slack, Python objects made while decoding

_M_MMAP_THRESHOLD, _LARGE = -3, 4 << 20  # of glibc's mallopt, and bytes

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # how version 1 says that there is no limit, about


def _status_kb(key: str) -> int:
    for line in (_PROC / "self/status").read_text().splitlines():
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


def return_large() -> None:
    """Have the memory of large tensors go back to the system whenever they are freed, from now on.

    glibc would keep it on the heap, where small things that stay come to lie in it: logits of ever other
    numbers of rows then take several times their size.
    """
    try:
        ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, _LARGE)
    except (OSError, AttributeError):
        return  # another C library


def available_bytes() -> int:
    """Memory that could still be taken: what the machine has free, and what control groups leave of it."""
    free = 0
    for line in (_PROC / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    for group in _groups():
        if group.limit is not None:
            free = min(free, max(group.limit - group.taken(), 0))
    return free


def cgroup_limit() -> int | None:
    """The least memory limit of this process's control groups, in bytes; None where there is none."""
    return min((group.limit for group in _groups() if group.limit is not None), default=None)


@dataclass(frozen=True, slots=True)
class _Group:
    """A control group's folder, and the names of its files: those of version 1, or of version 2."""

    folder: Path
    names: tuple[str, str]

    @property
    def limit(self) -> int | None:
        """Bytes; None where there is no limit, or no such group."""
        try:
            text = (self.folder / self.names[0]).read_text().strip()
        except OSError:
            return None
        return None if text == "max" or int(text) >= _UNLIMITED else int(text)

    def taken(self) -> int:
        """Bytes that are used, without pages of files that the system gives up as soon as others ask."""
        try:
            used = int((self.folder / self.names[1]).read_text())
            lines = (self.folder / "memory.stat").read_text().splitlines()
        except OSError:
            return 0
        counts = dict(line.split(maxsplit=1) for line in lines)
        return used - int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))


def _groups() -> Iterator[_Group]:
    """The control groups of this process, version 1 and 2, and those above them, whose limits hold too.

    In a container a group may have another name than in /proc; the topmost is always there.
    """
    try:
        lines = (_PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            top, names = _CGROUPS, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top, names = _CGROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = top / group.lstrip("/")
        yield from (_Group(above, names) for above in (folder, *folder.parents) if above.is_relative_to(top))
