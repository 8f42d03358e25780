"""Cache folders are made once and are complete or absent, even with kills and concurrent processes."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from offspec.core import files as disk
from offspec.core.cache_dir import cache_root, make_folder, remove_folder
from offspec.core.errors import CheckpointError, DiskFullError

CHILD = """
import os, signal, sys
from pathlib import Path
from offspec.core.cache_dir import make_folder

def fill(partial):
    print("filling", flush=True)
    (partial / "half").write_text("x")
    if sys.argv[2] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.readline()
    (partial / "whole").write_text("x")

make_folder(Path(sys.argv[1]), fill, lambda: print("waiting", flush=True))
"""


def child(folder: Path, deed: str) -> subprocess.Popen[str]:
    """Start another process that makes the folder, and stops halfway: killed, or until it reads a line."""
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), deed],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def fill(partial: Path) -> None:
    (partial / "file").write_text("whole")


def never() -> None:
    raise AssertionError("nobody to wait for")


def visible(root: Path) -> list[str]:
    return sorted(os.listdir(root))


def test_folder_is_made_once_and_appears_complete(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"

    def look(partial: Path) -> None:
        assert not folder.exists() and partial.parent == folder.parent
        fill(partial)

    make_folder(folder, look, never)
    assert (folder / "file").read_text() == "whole"
    make_folder(folder, lambda partial: pytest.fail("made twice"), never)
    assert visible(folder.parent) == ["folder"]
    for _ in range(2):
        remove_folder(folder)
        assert visible(folder.parent) == []


@pytest.mark.parametrize(
    ("error", "becomes", "why"),
    [
        (KeyboardInterrupt("x"), KeyboardInterrupt, "x"),
        (OSError(errno.EIO, "x"), OSError, "x"),
        (OSError(errno.ENOSPC, "No space left on device"), DiskFullError, "the disk is full: cannot write"),
    ],
    ids=["interrupt", "bad disk", "full disk"],
)
def test_errors_leave_no_files(
    tmp_path: Path, error: BaseException, becomes: type[BaseException], why: str
) -> None:
    def fail(partial: Path) -> None:
        fill(partial)
        raise error

    with pytest.raises(becomes, match=why):
        make_folder(tmp_path / "folder", fail, never)
    assert visible(tmp_path) == []
    make_folder(tmp_path / "folder", fill, never)  # the lock is free again


def test_read_only_or_full_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="OFFSPEC_CACHE"):
        make_folder(tmp_path / "file" / "folder", fill, never)
    disk.require_space(tmp_path / "not" / "yet" / "there", 1, "a test")
    with pytest.raises(DiskFullError, match=r"a test needs 1000\.00 TB in .* set OFFSPEC_CACHE"):
        disk.require_space(tmp_path / "not" / "yet", 10**15, "a test")


def test_leftovers_of_killed_processes_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "a-1.folder"
    for _ in range(2):
        process = child(folder, "die")
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        partial, _lock = visible(tmp_path)  # not more than the one before
        assert partial.endswith(".partial")
    make_folder(tmp_path / "other", fill, never)  # work on another folder cleans up, too
    assert visible(tmp_path) == ["other"]
    make_folder(folder, fill, never)
    assert (folder / "file").exists()


def test_two_processes_make_one_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    with child(folder, "work") as first:
        assert first.stdout and first.stdin and first.stdout.readline() == "filling\n"
        make_folder(tmp_path / "other", fill, never)  # does not remove the first one's files
        assert not folder.exists()
        write = first.stdin.write

        def wait() -> None:
            write("\n")
            first.communicate()

        make_folder(folder, lambda partial: pytest.fail("made twice"), wait)
    assert visible(folder) == ["half", "whole"]
    assert visible(tmp_path) == ["folder", "other"]


def test_location_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("OFFSPEC_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == Path("/home/someone/.cache/offspec")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the specification says to ignore it
    assert cache_root() == Path("/home/someone/.cache/offspec")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/xdg")
    assert cache_root() == Path("/var/xdg/offspec")
    monkeypatch.setenv("OFFSPEC_CACHE", "~/here")
    assert cache_root() == Path("/home/someone/here")
    assert cache_root(tmp_path) == tmp_path


def test_small_files_are_complete_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.write_atomic(tmp_path / "file", b"one")
    disk.write_atomic(tmp_path / "file", b"two")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(DiskFullError):
        disk.write_atomic(tmp_path / "file", b"three")
    assert (tmp_path / "file").read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["file"]
