"""Doctor: memory limits, and disks that are slow, full, not writable, or read through the page cache."""

import resource
import shutil
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from offspec.core import memory
from offspec.engine.doctor import disk
from offspec.engine.doctor import memory as limits
from offspec.engine.doctor.finding import DoctorOptions, Finding
from offspec.plan import hardware_profile
from offspec_planners.hardware_rates import Rate
from offspec_planners.measure import disk as measuring

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Shell limits by resource, none by default; 8 GB of RAM are free."""
    set_: dict[int, int] = {}
    monkeypatch.setattr(
        resource, "getrlimit", lambda which: (set_.get(which, resource.RLIM_INFINITY), resource.RLIM_INFINITY)
    )
    monkeypatch.setattr(memory, "available_bytes", lambda: 8_000_000_000)
    monkeypatch.setattr(memory, "cgroup_limit", lambda: None)
    monkeypatch.setattr(limits, "cards_on_bus", lambda: 0)
    return set_


@pytest.mark.parametrize(
    ("free", "group", "state", "words"),
    [
        (8_000_000_000, None, "ok", "8.00 GB free"),
        (8_000_000_000, 2_500_000_000, "ok", "; the control group allows 2.50 GB"),
        (900_000_000, None, "limited", "close other programs"),
    ],
)
def test_memory_without_limits_of_the_shell(
    shell: dict[int, int],
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    group: int | None,
    state: str,
    words: str,
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: free)
    monkeypatch.setattr(memory, "cgroup_limit", lambda: group)
    [ram] = limits.check(DoctorOptions())
    assert ram.state == state and words in ram.found + ram.remedy
    assert ram.figures["address_space"] is None


@pytest.mark.parametrize(("cards", "state"), [(0, "limited"), (1, "failed")])
def test_a_limit_of_addresses(
    shell: dict[int, int], monkeypatch: pytest.MonkeyPatch, cards: int, state: str
) -> None:
    monkeypatch.setattr(limits, "cards_on_bus", lambda: cards)
    shell[resource.RLIMIT_AS] = 1_000_000_000
    shell[resource.RLIMIT_DATA] = 10**15
    _, addresses, data = limits.check(DoctorOptions())
    assert (addresses.state, data.state) == (state, "limited")
    assert "ulimit -v unlimited" in addresses.remedy and "ulimit -d unlimited" in data.remedy


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """One disk for both caches: 2 GB/s past the page cache, 100 GB free."""
    from huggingface_hub import constants

    place: dict[str, Any] = {"rate": 2e9, "free": 100_000_000_000, "direct": True, "read": []}

    def rate(files: Sequence[Path], seconds: float) -> Rate:
        place["read"] = [file.stat().st_size for file in files]
        if isinstance(place["rate"], Exception):
            raise place["rate"]
        return Rate.exactly(place["rate"])

    monkeypatch.setenv("OFFSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hardware_profile, "_WRITTEN", 1 << 18)
    monkeypatch.setattr(hardware_profile, "_BLOCK", 1 << 16)
    monkeypatch.setattr(measuring, "disk_rate", rate)
    monkeypatch.setattr(disk, "_supports_direct_io", lambda file: place["direct"])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, place["free"]))
    monkeypatch.setattr(disk, "file_system", lambda folder: "ext4")
    return place


def found(*folders: Path) -> Finding:
    [finding] = disk.check(DoctorOptions(folders))
    return finding


def test_a_good_disk_is_named_once(place: dict[str, Any], tmp_path: Path) -> None:
    assert found(tmp_path).part == f"disk: cache, hub cache, {tmp_path}"
    assert (found().state, found().found) == (
        "ok",
        "ext4, read at 2.00 GB/s past the page cache; 100.00 GB free",
    )
    assert place["read"] == [1 << 18]
    assert not list(tmp_path.iterdir())  # nothing is left, and no folder was made


def test_large_files_that_are_there_are_read(
    place: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware_profile, "_LARGE", 1000)
    monkeypatch.setattr(hardware_profile, "_ENOUGH", 1000)
    (tmp_path / "model.safetensors").write_bytes(bytes(5000))
    found()
    assert place["read"] == [5000]


@pytest.mark.parametrize(
    ("changed", "state", "words", "remedy"),
    [
        ({"direct": False}, "limited", "O_DIRECT is not supported", "ext4 or XFS"),
        ({"rate": 1e8}, "limited", "(slow)", "faster disk"),
        ({"free": 10**9}, "limited", "only 1.00 GB free", "free disk space"),
        ({"rate": OSError(5, "Input/output error")}, "failed", "Input/output error", "dmesg"),
        ({"free": 1000}, "failed", "needs", ""),
    ],
)
def test_a_disk_that_is_not_well(
    place: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, Any],
    state: str,
    words: str,
    remedy: str,
) -> None:
    place.update(changed)
    if changed == {"free": 1000}:
        monkeypatch.setattr(hardware_profile, "_WRITTEN", 10**6)
    assert found().state == state
    assert words in found().found and remedy in found().remedy


def test_a_folder_that_is_closed(place: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert found().state == "failed" and "OFFSPEC_CACHE" in found().remedy


def test_the_kind_of_a_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 0:5 / / rw shared:1 - overlay overlay rw\n"
        "23 22 8:1 / /mnt rw - 9p C: rw\n"
        "24 23 8:2 / /mnt/my\\040disk rw - ext4 /dev/sda2 rw\n"
        "25 23 8:2 / /mnt/my\\040dis rw - tmpfs none rw\n"
    )
    monkeypatch.setattr(disk, "_MOUNTS", mounts)
    assert [disk.file_system(Path(name)) for name in ("/home", "/mnt/c", "/mnt/my disk/models")] == [
        "overlay",
        "9p",
        "ext4",
    ]


def test_a_page_is_read_by_the_reader_that_streams(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(1 << 16))
    assert disk._supports_direct_io(file) == measuring.reads_past_cache(file)
