"""Running a subprocess with a memory limit and an initially empty page cache."""

from __future__ import annotations

import errno
import os
import secrets
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from offspec.core.errors import OffspecError
from offspec_planners.units import format_bytes

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
_SAMPLE_SECONDS = 0.05
# $0 is the group's process list. The shell enters the group and then becomes the program, so every page,
# from the interpreter's first one on, is charged to the group.
_ENTER = 'echo $$ > "$0" && exec "$@"'


class BenchError(OffspecError):
    """A bench cannot run here, or not with these options."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Peak memory of a group, in bytes.

    peak: everything charged to it, page cache included (the kernel's own high-water mark).
    anon_peak: its anonymous memory alone, sampled every 50 ms.
    """

    peak: int
    anon_peak: int


class MemoryCgroup:
    """A child of this process's memory cgroup (v1 or v2) with a limit in bytes and no swap.

        with MemoryCgroup(1_500_000_000) as group:
            output = group.run([sys.executable, "-m", "module"])
        group.use.peak

    The program runs in the group from its first instruction. Its stdout is returned, its stderr passed
    through. Use one group per run: the peak covers the group's lifetime. Raises BenchError if groups cannot
    be created, and if the program fails or is killed because memory ran out.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit = limit_bytes
        self.use = MemoryUse(0, 0)
        self._anon_peak = self._total_peak = 0

    def __enter__(self) -> Self:
        self.folder, self.version = _create_group()
        try:
            _limit_group(self.folder, self.version, self.limit)
        except OSError as error:
            self.folder.rmdir()
            raise BenchError(f"the memory limit could not be set ({error.strerror}): run as root") from error
        return self

    def __exit__(self, *error: object) -> None:
        for _ in range(100):  # a group stays busy for a moment after its last process exits
            try:
                self.folder.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError as busy:
                if busy.errno != errno.EBUSY:
                    raise
                time.sleep(0.02)

    def run(self, argv: Sequence[str], *, cwd: Path | None = None) -> str:
        """Run a program inside the group and return its stdout. Afterwards `use` holds the peaks."""
        enter = ["/bin/sh", "-c", _ENTER, str(self.folder / "cgroup.procs"), *argv]
        done = threading.Event()
        sampler = threading.Thread(target=self._sample, args=(done,), daemon=True)
        with subprocess.Popen(enter, stdout=subprocess.PIPE, text=True, cwd=cwd) as process:
            sampler.start()
            try:
                output, _ = process.communicate()
            finally:
                done.set()
                sampler.join()
                if process.poll() is None:
                    process.kill()
                    process.wait()
        if self.version == 1:
            peak = self._number("memory.max_usage_in_bytes")
            kills = self._stat("memory.oom_control", "oom_kill")
        else:  # memory.peak requires Linux 5.19; before that only the samples are available
            peak = self._number("memory.peak") or self._total_peak
            kills = self._stat("memory.events", "oom_kill")
        self.use = MemoryUse(peak, self._anon_peak)
        if kills:
            raise BenchError(
                f"the measured process was killed: it needed more than {format_bytes(self.limit)}; "
                "raise the cap, or give the engine a smaller --memory"
            )
        if process.returncode:
            raise BenchError(f"the measured process failed with exit code {process.returncode}; see above")
        return output

    def _sample(self, done: threading.Event) -> None:
        while not done.wait(_SAMPLE_SECONDS):
            self._anon_peak = max(self._anon_peak, self._stat("memory.stat", "total_rss", "anon"))
            self._total_peak = max(self._total_peak, self._number("memory.current"))

    def _number(self, name: str) -> int:
        with suppress(OSError, ValueError):
            return int((self.folder / name).read_text())
        return 0

    def _stat(self, name: str, *keys: str) -> int:
        """Return the value of the first of `keys` in a "key value" file, or 0."""
        try:
            pairs = dict(line.split() for line in (self.folder / name).read_text().splitlines())
        except (OSError, ValueError):
            return 0
        return next((int(pairs[key]) for key in keys if key in pairs), 0)


def drop_caches() -> None:
    """Write back dirty pages and empty the page cache. Raises BenchError without permission."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError as error:
        raise BenchError(
            "the page cache cannot be dropped here (requires root): pass --keep-caches to measure without"
        ) from error


def _own_group(version: int) -> str:
    """Return the path of this process's group below the hierarchy's mount, from /proc/self/cgroup."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if (version == 1 and "memory" in controllers.split(",")) or (version == 2 and number == "0"):
            return path.lstrip("/")
    return ""


def _create_group() -> tuple[Path, int]:
    """Create an empty group with a memory controller; return it and its cgroup version."""
    name = f"offspec-bench-{os.getpid()}-{secrets.token_hex(3)}"
    place, version = _parent()
    try:
        (place / name).mkdir()
    except OSError as error:
        raise BenchError(
            f"a memory cgroup cannot be created here ({error.strerror}): run as root, or pass --no-cgroup"
        ) from error
    return place / name, version


def _parent() -> tuple[Path, int]:
    if (_V1 / "memory.limit_in_bytes").exists():
        own = _V1 / _own_group(1)
        # In a container the path may be the host's; then the mount itself is this process's group.
        return (own if own.is_dir() else _V1), 1
    for mount in _V2:
        if "memory" not in _words(mount / "cgroup.controllers"):
            continue
        place = mount / _own_group(2)
        # A v2 group that holds processes cannot limit its children, so a sibling group is used.
        for parent in (place, *place.parents):
            if not parent.is_relative_to(mount):
                break
            with suppress(OSError):
                (parent / "cgroup.subtree_control").write_text("+memory")
            if "memory" in _words(parent / "cgroup.subtree_control"):
                return parent, 2
    raise BenchError("no memory controller is available for a cgroup: pass --no-cgroup to measure without")


def _limit_group(folder: Path, version: int, limit: int) -> None:
    if version == 1:
        (folder / "memory.limit_in_bytes").write_text(str(limit))
        swap = folder / "memory.memsw.limit_in_bytes"
    else:
        (folder / "memory.max").write_text(str(limit))
        swap, limit = folder / "memory.swap.max", 0
    if swap.exists():
        swap.write_text(str(limit))


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
