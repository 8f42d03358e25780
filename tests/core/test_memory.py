"""What this process takes, as the system tells it."""

import subprocess
import sys
from pathlib import Path

import pytest

from offspec.core import memory

MEMINFO = "MemTotal:  16000000 kB\nMemAvailable:  8000000 kB\n"


def test_this_process_has_a_size() -> None:
    assert 10**6 < memory.resident_bytes() <= memory.peak_bytes() < 10**12
    assert memory.available_bytes() > 10**6
    memory.trim()


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
memory.return_large()
memory.trim()
assert taken(8 << 20) and taken(8 << 20) and not taken(1 << 20)
"""


def test_large_blocks_go_back() -> None:
    ran = subprocess.run([sys.executable, "-c", _MALLOC], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /proc and /sys/fs/cgroup: a machine with 8 GB free."""
    monkeypatch.setattr(memory, "_PROC", tmp_path)
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path / "cgroup")
    write(tmp_path / "meminfo", MEMINFO)
    return tmp_path


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def group_v2(folder: Path, limit: str, current: int, inactive: int) -> None:
    write(folder / "memory.max", f"{limit}\n")
    write(folder / "memory.current", f"{current}\n")
    write(folder / "memory.stat", f"anon {current - inactive}\ninactive_file {inactive}\n")


def test_without_control_groups_all_that_is_free_can_be_taken(system: Path) -> None:
    assert memory.available_bytes() == 8_000_000 * 1024
    assert memory.cgroup_limit() is None


def test_a_limit_of_a_group_above_holds_too(system: Path) -> None:
    write(system / "self" / "cgroup", "0::/user.slice/mine.scope\n")
    group_v2(system / "cgroup" / "user.slice", "4000000000", 1_500_000_000, 0)
    group_v2(system / "cgroup" / "user.slice" / "mine.scope", "max", 10**9, 0)
    assert memory.cgroup_limit() == 4_000_000_000
    assert memory.available_bytes() == 2_500_000_000


def test_pages_of_files_that_can_be_given_up_do_not_count(system: Path) -> None:
    write(system / "self" / "cgroup", "0::/\n")
    group_v2(system / "cgroup", "2000000000", 1_900_000_000, 1_500_000_000)
    assert memory.available_bytes() == 1_600_000_000


def test_version_1_under_another_name_than_in_a_container(system: Path) -> None:
    write(system / "self" / "cgroup", "5:cpu:/docker/1f\n4:memory:/docker/1f\n0::/docker/1f\n")
    folder = system / "cgroup" / "memory"
    write(folder / "memory.limit_in_bytes", "3000000000\n")
    write(folder / "memory.usage_in_bytes", "2000000000\n")
    write(folder / "memory.stat", "inactive_file 5\ntotal_inactive_file 500000000\n")
    assert memory.cgroup_limit() == 3_000_000_000
    assert memory.available_bytes() == 1_500_000_000


def test_how_version_1_tells_that_there_is_no_limit(system: Path) -> None:
    write(system / "self" / "cgroup", "4:memory:/\n")
    write(system / "cgroup" / "memory" / "memory.limit_in_bytes", "9223372036854771712\n")
    assert memory.cgroup_limit() is None
    assert memory.available_bytes() == 8_000_000 * 1024
