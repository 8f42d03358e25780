"""How much memory there is, and how much this process takes."""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from offspec.core.events import Event, Notice
from offspec_planners.units import format_bytes

RUNTIME = 368_000_000  # bytes that Python, torch and transformers take in a process of their own, about
_RUNTIME_STEP = 32_000_000
_CODE = 60_000_000  # of them code that comes back after `forget_code`, while tokens are made
_first_runtime = 0
MARGIN = 64 << 20  # thread stacks, the allocator's slack, Python objects made while decoding

_M_MMAP_THRESHOLD, _LARGE = -3, 4 << 20  # of glibc's mallopt, and bytes
_MADV_DONTNEED = 4
_PRODUCTS = "64"  # more than one layer of a pass has, but for a long prompt

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # how version 1 says that there is no limit, about


def _kilobytes(file: str, key: str) -> int:
    """Bytes that a file in /proc gives in kB; 0 without the key."""
    for line in (_PROC / file).read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0


def resident_bytes() -> int:
    """Memory that this process holds now."""
    return _kilobytes("self/status", "VmRSS")


def steady_runtime(*, fresh: bool) -> int:
    """What to set aside for this process as it is without weights, its code forgotten, in steps.

    It differs by a few megabytes from run to run; what fits must not, or every plan would be made twice. Nor
    must it grow with what an engine that was closed left on the heap, where the next one will find room:
    unless this is `fresh`, as where another engine is open, the first answer stands.
    """
    global _first_runtime
    if fresh or not _first_runtime:
        steps = -(-max(resident_bytes() + _CODE - RUNTIME, 0) // _RUNTIME_STEP)
        found = RUNTIME + steps * _RUNTIME_STEP
        _first_runtime = _first_runtime or found
        return found
    return _first_runtime


def peak_bytes() -> int:
    """The most memory that this process has held since it began."""
    return _kilobytes("self/status", "VmHWM")


def trim() -> None:
    """Hand freed memory back to the system: what loading left behind would count against the limit."""
    with suppress(OSError, AttributeError):  # another C library; nothing is lost but the slack
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def forget_code() -> None:
    """Have the pages of libraries leave this process; those that run again come back from the page cache.

    Importing and compiling run a great deal of code that nothing runs afterwards. Of a mapping that was
    written to, every page stays.
    """
    try:
        madvise = ctypes.CDLL("libc.so.6").madvise
    except (OSError, AttributeError):
        return  # another C library; nothing is lost but the room
    place, size = 0, 0
    for line in _text(_PROC / "self/smaps").splitlines():
        first, *others = line.split()
        if not first.endswith(":"):
            start, end = (int(number, 16) for number in first.split("-"))
            read_only = others[0] in ("r-xp", "r--p") and others[-1].startswith("/")
            place, size = (start, end - start) if read_only else (0, 0)
        elif first == "Anonymous:" and others[0] == "0" and size:
            madvise(ctypes.c_void_p(place), ctypes.c_size_t(size), _MADV_DONTNEED)


def limit_products() -> None:
    """Have oneDNN, which multiplies for torch, keep the code of few shapes of products; the environment wins.

    Its default is a thousand of half a megabyte each, which answers at ever other lengths would fill. Another
    is made in less than a millisecond. It is told by its environment, which it reads at its first product.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _PRODUCTS)


def return_large() -> None:
    """Have the memory of large tensors go back to the system whenever they are freed, from now on.

    glibc would keep it on the heap, where small things that stay come to lie in it: logits of ever other
    numbers of rows then take several times their size.
    """
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, _LARGE)


def available_bytes() -> int:
    """Memory that could still be taken: what the machine has free, and what control groups leave of it."""
    free = _kilobytes("meminfo", "MemAvailable")
    for group in _groups():
        if group.limit is not None:
            free = min(free, max(group.limit - group.taken(), 0))
    return free


def cgroup_limit() -> int | None:
    """The least memory limit of this process's control groups, in bytes; None where there is none."""
    return min((group.limit for group in _groups() if group.limit is not None), default=None)


def usable_bytes() -> int:
    """What to use where no limit was given: nine tenths of what is free and of what this process has."""
    return int(0.9 * (available_bytes() + resident_bytes()))


def within_groups(asked: int, notify: Callable[[Event], None]) -> int:
    """The limit that was asked for; one that a control group does not allow would have the process killed.

    notify: takes a Notice where it is less.
    """
    limit = cgroup_limit()
    if limit is None or asked <= limit:
        return asked
    given = min(usable_bytes(), limit)
    notify(
        Notice(
            f"the control group of this process allows {format_bytes(limit)} of memory, less than the "
            f"{format_bytes(asked)} of `memory`: {format_bytes(given)} are used; for more, raise the limit "
            "of the container or service"
        )
    )
    return given


@dataclass(frozen=True, slots=True)
class _Kind:
    """A version of control groups: the names of its files.

    limits: each has a limit, of which the least holds; used: bytes that are charged; total: how counts in
    `memory.stat` begin that are of all processes of a group and of those below; hierarchical: the count that
    is the least limit of a group and of those above it, which a container may not see.
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
        """Bytes; None where there is no limit, or no such group."""
        texts = [_text(self.folder / name) for name in self.kind.limits]
        found = [int(text) for text in texts if text.isdecimal()]
        if above := self._counts().get(self.kind.hierarchical):
            found.append(above)
        return min((limit for limit in found if limit < _UNLIMITED), default=None)

    def taken(self) -> int:
        """Bytes that are used, without pages of files that the system gives up as soon as others ask.

        Whatever was read or written lately is among those, a model that was just downloaded, too. Those that
        programs have mapped, such as their code, they would read again at once.
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
    """What a file says, or nothing where it cannot be read."""
    try:
        return file.read_text().strip()
    except (OSError, ValueError):
        return ""


def _groups() -> Iterator[_Group]:
    """The control groups of this process, version 1 and 2, and those above them, whose limits hold too.

    In a container a group may have another name than in /proc; the topmost is always there.
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
    """Where each version's groups are mounted, and which group is the topmost there: a container's own."""
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
