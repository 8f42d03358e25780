"""Memory use of this process, as reported by the system."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench.lib.cgroup import BenchError, MemoryCgroup
from offspec.core import memory
from offspec.core.events import Event, Notice

MEMINFO = "MemTotal:  16000000 kB\nMemAvailable:  8000000 kB"


def test_this_process_has_a_size() -> None:
    assert 10**6 < memory.resident_bytes() <= memory.peak_bytes() < 10**12
    assert memory.available_bytes() > 10**6
    memory.malloc_trim()


_MALLOC = """
import ctypes
from offspec.core import memory

libc = ctypes.CDLL("libc.so.6")
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "abcdefghij"]  # the fifth: bytes outside the heap

libc.mallinfo2.restype = Info

def taken(size):
    before = libc.mallinfo2().e
    block = libc.malloc(size)
    there = libc.mallinfo2().e - before
    libc.free(block)
    return there >= size

assert taken(16 << 20) and not taken(8 << 20), "what was freed once is kept on the heap the next time"
memory.lower_mmap_threshold()
memory.malloc_trim()
assert taken(8 << 20) and taken(8 << 20) and not taken(1 << 20)
"""


def test_large_blocks_are_returned_to_the_system() -> None:
    ran = subprocess.run([sys.executable, "-c", _MALLOC], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


_TORCH = """
from pathlib import Path
from offspec.core import memory
memory.limit_onednn_cache()
import torch

def resident(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what))

anonymous, files = resident("RssAnon"), resident("RssFile")
memory.evict_code_pages()
assert files - resident("RssFile") > 40 << 20, "most of it ran while torch was imported"
assert abs(anonymous - resident("RssAnon")) < 4 << 20
square = torch.arange(4.0).view(2, 2)
assert (square @ square).tolist() == [[2.0, 3.0], [6.0, 11.0]]

columns = torch.ones(64, 128, dtype=torch.bfloat16)
for turn in range(2):
    print("turn", flush=True)
    for rows in range(1, 100):
        torch.ones(rows, 64, dtype=torch.bfloat16) @ columns
"""


def test_compiled_code_is_bounded_and_recompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_VERBOSE", "profile_create")
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    ran = subprocess.run([sys.executable, "-c", _TORCH], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    _, first, second = (part.count("create:cache_miss") for part in ran.stdout.split("turn\n"))
    if not first:
        pytest.skip("oneDNN multiplies no bfloat16 here")
    assert second > first / 2, "those that were left out are made again"


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /proc and /sys/fs/cgroup: a machine with 8 GB free."""
    monkeypatch.setattr(memory, "_PROC", tmp_path)
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path / "cgroup")
    write(tmp_path, {"meminfo": MEMINFO})
    return tmp_path


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")


def group(folder: str, limit: str, current: int, **counts: int) -> dict[str, str]:
    """Files of a control group, in megabytes except the limit; version 1 in a folder of that name."""
    names = ("limit_in_bytes", "usage_in_bytes") if folder.startswith("cgroup/memory") else ("max", "current")
    stat = "\n".join(f"{name} {count}000000" for name, count in counts.items())
    values = (limit, f"{current}000000")
    files = {f"{folder}/memory.{name}": value for name, value in zip(names, values, strict=True)}
    return files | {f"{folder}/memory.stat": stat}


V2, V1 = {"self/cgroup": "0::/"}, {"self/cgroup": "5:cpu:/docker/1f\n4:memory:/docker/1f\n0::/docker/1f"}
UNLIMITED = "9223372036854771712"
MOUNTS = """31 23 0:28 / /proc rw - proc proc rw
41 31 0:38 /docker/1f {} rw,relatime shared:9 - cgroup2 cgroup rw,nsdelegate"""
DOWNLOADED = {"inactive_file": 100, "active_file": 1180, "file_mapped": 50, "slab_reclaimable": 20}
OF_ALL = {"total_inactive_file": 100, "total_active_file": 1200, "total_mapped_file": 100, "active_file": 5}
GROUPS = {
    "without groups all that is free": ({}, None, 8192),
    "a limit of a group above holds too": (
        {"self/cgroup": "0::/user.slice/mine.scope"}
        | group("cgroup/user.slice", "4000000000", 1500)
        | group("cgroup/user.slice/mine.scope", "max", 1000),
        *(4000, 2500),
    ),
    "idle pages of files do not count": (
        V2 | group("cgroup", "2000000000", 1900, inactive_file=1500),
        *(2000, 1600),
    ),
    "nor active ones, as of a file just downloaded, unless mapped; nor slabs": (
        V2 | group("cgroup", "1500000000", 1450, **DOWNLOADED),
        *(1500, 1300),
    ),
    "version 1, by another name than in a container, counts all processes": (
        V1 | group("cgroup/memory", "1500000000", 1450, **OF_ALL),
        *(1500, 1250),
    ),
    "version 1 without a limit": (V1 | group("cgroup/memory", UNLIMITED, 500), None, 8192),
    "version 1 below a limit that a container does not see": (
        V1 | group("cgroup/memory", UNLIMITED, 500, hierarchical_memory_limit=2000),
        *(2000, 1500),
    ),
    "a soft limit, beyond which version 2 slows everything down": (
        V2 | group("cgroup", "4000000000", 1000) | {"cgroup/memory.high": "3000000000"},
        *(3000, 2000),
    ),
    "a container's own group is the topmost that is mounted": (
        {"self/cgroup": "0::/docker/1f/inner", "self/mountinfo": MOUNTS}
        | group("elsewhere", "4000000000", 1000)
        | group("elsewhere/inner", "3000000000", 1000),
        *(3000, 2000),
    ),
}


@pytest.mark.parametrize(("files", "limit", "free"), GROUPS.values(), ids=GROUPS)
def test_available_memory_in_control_groups(
    files: dict[str, str], limit: int | None, free: int, system: Path
) -> None:
    """Limit and free memory, in megabytes."""
    write(system, {name: text.format(system / "elsewhere") for name, text in files.items()})
    assert memory.cgroup_limit() == (limit and limit * 10**6)
    assert memory.available_bytes() == free * 10**6


def test_limit_above_the_groups_is_lowered(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notices = list[Event]()
    assert memory.limit_to_cgroup(6 * 10**9, notices.append) == 6 * 10**9 and not notices
    write(system, V2 | group("cgroup", "4000000000", 1000))
    monkeypatch.setattr(memory, "resident_bytes", lambda: 500_000_000)
    assert memory.limit_to_cgroup(4 * 10**9, notices.append) == 4 * 10**9 and not notices
    assert memory.limit_to_cgroup(6 * 10**9, notices.append) == int(0.9 * 3_500_000_000)
    (notice,) = notices
    assert isinstance(notice, Notice) and "4.00 GB" in notice.text and "6.00 GB" in notice.text


_READS_A_FILE = """
import os, tempfile
from offspec.core import memory
with tempfile.NamedTemporaryFile(dir=".") as file:
    for _ in range(200):
        file.write(bytes(10**6))
    file.flush()
    os.fsync(file.fileno())
    for _ in range(2):
        file.seek(0)
        while file.read(10**6):
            pass
    print(memory.cgroup_limit(), memory.available_bytes())
"""


def test_real_control_group_version_1() -> None:
    """A process in a group with a limit on its parent, and a file just read: both are considered."""
    try:
        outer = MemoryCgroup(600_000_000).__enter__()
    except BenchError as error:
        pytest.skip(str(error))
    inner = outer.folder / "inner"
    try:
        if outer.version != 1:
            pytest.skip("groups of version 1 are not mounted")
        inner.mkdir()
        enter = f'echo $$ > {inner}/cgroup.procs && exec "$@"'
        command = ["/bin/sh", "-c", enter, "sh", sys.executable, "-c", _READS_A_FILE]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        limit, free = map(int, said)
        assert 590_000_000 < limit <= 600_000_000
        assert 450_000_000 < free <= limit
    finally:
        if inner.exists():
            inner.rmdir()
        outer.__exit__(None, None, None)
