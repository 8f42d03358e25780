"""What this process takes, as the system tells it."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench.lib.cgroup import BenchError, MemoryCgroup
from offspec.core import memory
from offspec.core.events import Event, Notice

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


_CODE = """
from pathlib import Path
from offspec.core import memory
import torch
def resident(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what))
anonymous, files = resident("RssAnon"), resident("RssFile")
memory.forget_code()
assert files - resident("RssFile") > 40 << 20, "most of it ran while torch was imported"
assert abs(anonymous - resident("RssAnon")) < 4 << 20
square = torch.arange(4.0).view(2, 2)
assert (square @ square).tolist() == [[2.0, 3.0], [6.0, 11.0]]
"""


def test_code_that_is_forgotten_comes_back_when_it_runs() -> None:
    ran = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


_PRODUCTS = """
from offspec.core import memory
memory.limit_products()
import torch
columns = torch.ones(64, 128, dtype=torch.bfloat16)
for rows in (*range(1, 100), *range(1, 100)):
    torch.ones(rows, 64, dtype=torch.bfloat16) @ columns
"""


def test_few_products_stay_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> int:
        ran = subprocess.run([sys.executable, "-c", _PRODUCTS], capture_output=True, text=True, check=True)
        return ran.stdout.count("create:cache_miss")

    monkeypatch.setenv("ONEDNN_VERBOSE", "profile_create")
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "1000")
    if not (once := made()):
        pytest.skip("oneDNN multiplies no bfloat16 here")
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    assert made() > 1.5 * once, "those that were left out are made again"


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


def test_pages_of_a_file_that_was_just_downloaded_do_not_count(system: Path) -> None:
    """They are active, and are given up like the others; those that programs have mapped are not."""
    write(system / "self" / "cgroup", "0::/\n")
    folder = system / "cgroup"
    group_v2(folder, "1500000000", 1_450_000_000, 100_000_000)
    write(
        folder / "memory.stat",
        "inactive_file 100000000\nactive_file 1180000000\nfile_mapped 50000000\nslab_reclaimable 20000000\n",
    )
    assert memory.available_bytes() == 1_300_000_000


def test_version_1_counts_such_pages_of_all_processes(system: Path) -> None:
    write(system / "self" / "cgroup", "4:memory:/\n")
    folder = system / "cgroup" / "memory"
    write(folder / "memory.limit_in_bytes", "1500000000\n")
    write(folder / "memory.usage_in_bytes", "1450000000\n")
    write(
        folder / "memory.stat",
        "active_file 5\ntotal_inactive_file 100000000\ntotal_active_file 1200000000\n"
        "total_mapped_file 100000000\n",
    )
    assert memory.available_bytes() == 1_250_000_000


def test_a_limit_of_a_parent_that_a_container_does_not_see(system: Path) -> None:
    """Version 1 tells it in the counts of the group itself."""
    write(system / "self" / "cgroup", "4:memory:/docker/1f\n")
    folder = system / "cgroup" / "memory"
    write(folder / "memory.limit_in_bytes", "9223372036854771712\n")
    write(folder / "memory.usage_in_bytes", "500000000\n")
    write(folder / "memory.stat", "hierarchical_memory_limit 2000000000\n")
    assert memory.cgroup_limit() == 2_000_000_000
    assert memory.available_bytes() == 1_500_000_000


def test_a_soft_limit_beyond_which_version_2_slows_everything_down(system: Path) -> None:
    write(system / "self" / "cgroup", "0::/\n")
    group_v2(system / "cgroup", "4000000000", 10**9, 0)
    write(system / "cgroup" / "memory.high", "3000000000\n")
    assert memory.cgroup_limit() == 3_000_000_000


def test_groups_are_looked_for_where_they_are_mounted(system: Path) -> None:
    """A container's own group is the topmost that is mounted, and there may be others below it."""
    own = system / "elsewhere"
    write(system / "self" / "cgroup", "0::/docker/1f/inner\n")
    write(
        system / "self" / "mountinfo",
        f"31 23 0:28 / /proc rw - proc proc rw\n"
        f"41 31 0:38 /docker/1f {own} rw,relatime shared:9 - cgroup2 cgroup rw,nsdelegate\n",
    )
    group_v2(own, "4000000000", 10**9, 0)
    group_v2(own / "inner", "3000000000", 10**9, 0)
    assert memory.cgroup_limit() == 3_000_000_000
    assert memory.available_bytes() == 2_000_000_000


def test_a_limit_above_that_of_the_group_is_lowered_to_it(
    system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notices = list[Event]()
    assert memory.within_groups(6 * 10**9, notices.append) == 6 * 10**9 and not notices
    write(system / "self" / "cgroup", "0::/\n")
    group_v2(system / "cgroup", "4000000000", 10**9, 0)
    monkeypatch.setattr(memory, "resident_bytes", lambda: 500_000_000)
    assert memory.within_groups(4 * 10**9, notices.append) == 4 * 10**9 and not notices
    assert memory.within_groups(6 * 10**9, notices.append) == int(0.9 * 3_500_000_000)
    (notice,) = notices
    assert isinstance(notice, Notice) and "4.00 GB" in notice.text and "6.00 GB" in notice.text


def test_a_real_group_of_version_1() -> None:
    """A process in a group with a limit above it, and a file just read: neither is overlooked."""
    try:
        outer = MemoryCgroup(600_000_000).__enter__()
    except BenchError as error:
        pytest.skip(str(error))
    try:
        if outer.version != 1:
            pytest.skip("groups of version 1 are not mounted")
        inner = outer.folder / "inner"
        inner.mkdir()
        program = (
            "import os, tempfile\n"
            "from offspec.core import memory\n"
            "with tempfile.NamedTemporaryFile(dir='.') as file:\n"
            "    for _ in range(200):\n"
            "        file.write(bytes(10**6))\n"
            "    file.flush()\n"
            "    os.fsync(file.fileno())\n"
            "    for _ in range(2):\n"
            "        file.seek(0)\n"
            "        while file.read(10**6):\n"
            "            pass\n"
            "    print(memory.cgroup_limit(), memory.available_bytes())\n"
        )
        enter = f'echo $$ > {inner}/cgroup.procs && exec "$@"'
        command = ["/bin/sh", "-c", enter, "sh", sys.executable, "-c", program]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        limit, free = map(int, said)
        assert 590_000_000 < limit <= 600_000_000
        assert 450_000_000 < free <= limit
    finally:
        inner.rmdir()
        outer.__exit__(None, None, None)
