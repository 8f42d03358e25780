"""Available memory of the machine, and memory use of this process."""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from offspec.core.events import Event, Notice
from offspec_planners.units import format_bytes

RUNTIME = 368_000_000  # approximate bytes of a process with Python, torch and transformers
_RUNTIME_STEP = 32_000_000
_CODE = 60_000_000  # part of RUNTIME: code that decoding reloads after `evict_code_pages`
_first_runtime = 0
MARGIN = 64 << 20  # thread stacks, allocator slack, Python objects created while decoding

_M_MMAP_THRESHOLD, _LARGE = -3, 4 << 20  # of glibc's mallopt, and bytes
_MADV_DONTNEED = 4
_PRODUCTS = "64"  # more matrix products than a layer has in one pass, except for a long prompt

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # version 1 reports larger values if there is no limit


def _kilobytes(file: str, key: str) -> int:
    """Return the bytes of an entry in kB in a file of /proc; 0 without the key."""
    for line in (_PROC / file).read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return _kilobytes("self/status", "VmRSS")


def runtime_overhead(*, fresh: bool) -> int:
    """Return the bytes to reserve for this process without weights and evicted code, rounded up in steps.

    The size varies by a few megabytes between runs. The steps keep placements, and so plans, the same. Memory
    that a closed engine left on the heap does not count, because the next engine reuses it: the first result
    is kept unless `fresh` is set, for example while another engine is open.
    """
    global _first_runtime
    if fresh or not _first_runtime:
        steps = -(-max(resident_bytes() + _CODE - RUNTIME, 0) // _RUNTIME_STEP)
        found = RUNTIME + steps * _RUNTIME_STEP
        _first_runtime = _first_runtime or found
        return found
    return _first_runtime


def peak_bytes() -> int:
    """Return the peak resident memory of this process in bytes."""
    return _kilobytes("self/status", "VmHWM")


def malloc_trim() -> None:
    """Return freed memory to the system; memory left over from loading would count against the limit."""
    with suppress(OSError, AttributeError):  # another C library: the slack stays
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def evict_code_pages() -> None:
    """Evict the code pages of libraries; pages that are used again return from the page cache.

    Importing and compiling run much code that is not used afterwards. Mappings that were written to are kept.
    """
    try:
        madvise = ctypes.CDLL("libc.so.6").madvise
    except (OSError, AttributeError):
        return  # another C library: the pages stay
    place, size = 0, 0
    for line in _text(_PROC / "self/smaps").splitlines():
        first, *others = line.split()
        if not first.endswith(":"):
            start, end = (int(number, 16) for number in first.split("-"))
            read_only = others[0] in ("r-xp", "r--p") and others[-1].startswith("/")
            place, size = (start, end - start) if read_only else (0, 0)
        elif first == "Anonymous:" and others[0] == "0" and size:
            madvise(ctypes.c_void_p(place), ctypes.c_size_t(size), _MADV_DONTNEED)


def limit_onednn_cache() -> None:
    """Limit the number of compiled matrix products that oneDNN caches, unless the environment sets it.

    The default is a thousand entries of half a megabyte each, which answers of varying lengths would fill.
    Compiling a new one takes less than a millisecond. oneDNN reads the environment at its first product.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _PRODUCTS)


def lower_mmap_threshold() -> None:
    """Make glibc return the memory of large tensors to the system as soon as they are freed.

    Otherwise glibc keeps it on the heap, where small long-lived objects fragment it: logits with varying
    numbers of rows then take several times their size.
    """
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, _LARGE)


def available_bytes() -> int:
    """Return the bytes that are still available on the machine within the limits of control groups."""
    free = _kilobytes("meminfo", "MemAvailable")
    for group in _groups():
        if group.limit is not None:
            free = min(free, max(group.limit - group.used_bytes(), 0))
    return free


def cgroup_limit() -> int | None:
    """Return the smallest memory limit of this process's control groups in bytes, or None."""
    return min((group.limit for group in _groups() if group.limit is not None), default=None)


def usable_bytes() -> int:
    """Return the default memory limit in bytes: 90 % of free memory plus this process's own memory."""
    return int(0.9 * (available_bytes() + resident_bytes()))


def limit_to_cgroup(asked: int, notify: Callable[[Event], None]) -> int:
    """Return the requested memory limit in bytes, lowered if the control group would kill the process.

    notify: receives a Notice if the limit is lowered.
    """
    limit = cgroup_limit()
    if limit is None or asked <= limit:
        return asked
    given = min(usable_bytes(), limit)
    notify(
        Notice(
            f"the control group of this process allows {format_bytes(limit)} of memory, less than `memory` "
            f"({format_bytes(asked)}): using {format_bytes(given)}; for more, raise the limit of the "
            "container or service"
        )
    )
    return given


@dataclass(frozen=True, slots=True)
class _Kind:
    """File and key names of one version of control groups.

    limits: files with a limit; the smallest one applies. used: file with the charged bytes. total: prefix of
    the keys in `memory.stat` that include descendant groups. hierarchical: key of the smallest limit of a
    group and its ancestors, which a container may not see.
    """

    limits: tuple[str, ...]
    used: str
    total: str
    hierarchical: str


_KINDS = {
    1: _Kind(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_", "hierarchical_memory_limit"),
    2: _Kind(("memory.max", "memory.high"), "memory.current", "", ""),
}


@dataclass(frozen=True, slots=True)
class _Group:
    """A control group's folder."""

    folder: Path
    kind: _Kind

    @property
    def limit(self) -> int | None:
        """Limit in bytes; None if there is no limit or no such group."""
        texts = [_text(self.folder / name) for name in self.kind.limits]
        found = [int(text) for text in texts if text.isdecimal()]
        if above := self._counts().get(self.kind.hierarchical):
            found.append(above)
        return min((limit for limit in found if limit < _UNLIMITED), default=None)

    def used_bytes(self) -> int:
        """Return the used bytes without reclaimable file pages.

        Reclaimable pages include all recently read or written files, such as a model that was just
        downloaded. Mapped pages, such as code, count as used: programs would read them again at once.
        """
        used, counts, total = _text(self.folder / self.kind.used), self._counts(), self.kind.total
        if not used.isdecimal():
            return 0
        idle = counts.get(f"{total}inactive_file", 0)
        files = idle + counts.get(f"{total}active_file", 0)
        mapped = counts.get(f"{total}mapped_file", counts.get("file_mapped", 0))
        slabs = counts.get("slab_reclaimable", 0)
        return max(int(used) - max(idle, files - mapped) - slabs, 0)

    def _counts(self) -> dict[str, int]:
        pairs = (line.split(maxsplit=1) for line in _text(self.folder / "memory.stat").splitlines())
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _text(file: Path) -> str:
    """Return the contents of a file, or "" if it cannot be read."""
    try:
        return file.read_text().strip()
    except (OSError, ValueError):
        return ""


def _groups() -> Iterator[_Group]:
    """Yield the control groups of this process, version 1 and 2, and their ancestors.

    The limits of ancestors apply as well. In a container a group may have another name than in /proc; the
    topmost group always exists.
    """
    mounts = _mounts()
    for line in _text(_PROC / "self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            version = 2
        elif "memory" in controllers.split(","):
            version = 1
        else:
            continue
        top, root = mounts[version]
        inside = PurePosixPath(group)
        folder = top / (inside.relative_to(root) if inside.is_relative_to(root) else group.lstrip("/"))
        for above in (folder, *folder.parents):
            if above.is_relative_to(top):
                yield _Group(above, _KINDS[version])


def _mounts() -> dict[int, tuple[Path, str]]:
    """Return the mount point and topmost group, a container's own, of each version of control groups."""
    found = {1: (_CGROUPS / "memory", "/"), 2: (_CGROUPS, "/")}
    for line in _text(_PROC / "self/mountinfo").splitlines():
        about, _, kind = line.partition(" - ")
        root, place = about.split()[3:5]
        name, _, options = (*kind.split(maxsplit=2), "", "")[:3]
        if name == "cgroup2":
            found[2] = Path(place), root
        elif name == "cgroup" and "memory" in options.split(","):
            found[1] = Path(place), root
    return found
