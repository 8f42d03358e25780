"""Conversations are private to their user, and a lock does not follow links."""

import os
import stat
from pathlib import Path

import pytest

from offspec.core.events import Event, Notice
from offspec.core.file_lock import is_claimed, lock_for, release
from offspec.core.private_folders import restrict_permissions


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_folders_readable_by_others_are_made_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, cache = tmp_path / "data", tmp_path / "cache"
    monkeypatch.setenv("OFFSPEC_DATA", str(data))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("not ours to close")
    elsewhere.chmod(0o644)
    for file in (data / "sessions" / "a.json", cache / "distill" / "text" / "text-0.safetensors"):
        file.parent.mkdir(parents=True)
        file.write_text("said")
        file.chmod(0o644)
        file.parent.chmod(0o755)
    (data / "sessions" / "link.json").symlink_to(elsewhere)
    told: list[Event] = []
    restrict_permissions(told.append, cache)
    for path in (data / "sessions", cache / "distill", cache / "distill" / "text"):
        assert mode(path) == 0o700
    assert mode(data / "sessions" / "a.json") == mode(cache / "distill/text/text-0.safetensors") == 0o600
    assert mode(elsewhere) == 0o644 and mode(data) == mode(cache) != 0o700
    (notice,) = told
    assert isinstance(notice, Notice) and str(data / "sessions") in notice.text
    restrict_permissions(told.append, cache)
    assert len(told) == 1


def test_lock_that_is_a_symlink_or_fifo_is_refused(tmp_path: Path) -> None:
    target, file, lock = (tmp_path / name for name in ("target", "session.json", ".session.json.lock"))
    lock.symlink_to(target)
    assert not is_claimed(file)
    with pytest.raises(OSError, match=r"[Ll]ink|ELOOP|Too many"):
        lock_for(file).acquire(timeout=0.1)
    assert not target.exists()
    lock.unlink()
    os.mkfifo(lock)
    assert not is_claimed(file)


def test_lock_files_cause_no_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFSPEC_DATA", str(tmp_path))
    sessions = tmp_path / "sessions"
    sessions.mkdir(mode=0o755)
    lock, said = sessions / ".a.json.lock", sessions / "a.json"
    lock.touch(0o644)
    told: list[Event] = []
    sessions.chmod(0o700)
    said.write_text("said")
    said.chmod(0o644)
    restrict_permissions(told.append)
    assert told == [] and mode(lock) == mode(said) == 0o600
    sessions.chmod(0o755)
    restrict_permissions(told.append)
    assert len(told) == 1, "its names could be read"


def test_lock_is_private_and_removed_on_release(tmp_path: Path) -> None:
    lock = lock_for(tmp_path / "a")
    lock.acquire()
    assert mode(tmp_path / ".a.lock") == 0o600
    release(lock)
    assert list(tmp_path.iterdir()) == []
