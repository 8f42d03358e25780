"""The folder of conversations: sorted by time, searched by several names, and tolerant of damaged files."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from offspec.chat.archive import SessionArchive
from offspec.chat.conversation import Conversation, Message
from offspec.core.errors import SessionError
from offspec.core.private_folders import data_root


@pytest.fixture
def archive(tmp_path: Path) -> SessionArchive:
    return SessionArchive(tmp_path / "sessions")


def keep(archive: SessionArchive, number: int, question: str = "", model: str = "demo") -> Conversation:
    talk = Conversation(
        model=model,
        id=f"20260101-00000{number}-a{number}",
        updated=f"2026-01-01T00:00:0{number}Z",
        messages=[Message("user", question or f"Question {number}"), Message("assistant", "Yes.")],
    )
    talk.write(archive.file_for(talk))
    return talk


def test_data_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OFFSPEC_DATA", str(tmp_path / "ours"))
    assert data_root() == tmp_path / "ours" and SessionArchive().folder == tmp_path / "ours" / "sessions"
    monkeypatch.delenv("OFFSPEC_DATA")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "theirs"))
    assert data_root() == tmp_path / "theirs" / "offspec"
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_root() == tmp_path / ".local" / "share" / "offspec"


def test_latest_first(archive: SessionArchive, monkeypatch: pytest.MonkeyPatch) -> None:
    assert archive.list() == [] and archive.latest() is None and not archive.damaged
    for number, model in ((2, "demo"), (3, "other"), (1, "demo")):
        keep(archive, number, model=model)
    silent = Conversation(model="demo")
    silent.write(archive.file_for(silent))
    monkeypatch.setattr(Conversation, "read", None)  # the first line of a file is enough
    assert [entry.title for entry in archive.list()] == ["Question 3", "Question 2", "Question 1"]
    latest, mine = archive.latest(), archive.latest("demo")
    assert latest and latest.model == "other" and mine and mine.title == "Question 2" and mine.turns == 1
    assert archive.latest("third") is None


def test_damaged_files_are_skipped_and_counted(archive: SessionArchive) -> None:
    talk = keep(archive, 1)
    whole = archive.file_for(talk).read_bytes()
    otherwise = json.dumps(json.loads(whole), indent=2).replace(talk.id, "otherwise")
    for name, content in {
        "empty.json": b"",
        "noise.json": bytes(range(256)),
        "foreign.json": b'{"a": 1}',
        "list.json": b"[]\n]}\n",
        "cut.json": whole[:-30],
        "later.json": whole.replace(b'"offspec_session": 1', b'"offspec_session": 9'),
        "otherwise.json": otherwise.encode(),  # formatted by another program, and complete
    }.items():
        (archive.folder / name).write_bytes(content)
    (archive.folder / "folder.json").mkdir()
    (archive.folder / "notes.txt").write_text("mine")
    (archive.folder / ".x.json.1-ab.partial").write_text("{")
    assert sorted(entry.id for entry in archive.list()) == [talk.id, "otherwise"]
    assert len(archive.damaged) == 6


def test_unreadable_files_are_named_with_the_reason(
    archive: SessionArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut, closed = (keep(archive, number) for number in (1, 2, 3))
    file = archive.file_for(cut)
    file.write_bytes(file.read_bytes()[:-30])
    forbid(monkeypatch, archive.file_for(closed))
    assert [entry.id for entry in archive.list()] == [whole.id]
    assert [damaged.file for damaged in archive.damaged] == [file, archive.file_for(closed)]
    assert f"{file} is not a valid session file: line 3 is not JSON: " in archive.damaged[0].reason
    assert (
        f"cannot read the session {archive.file_for(closed)}: Permission denied"
        in archive.unreadable_summary()
    )
    with pytest.raises(SessionError, match=f"^cannot read the session .*{closed.id}.json: Permission denied"):
        archive.find(closed.id)
    with pytest.raises(SessionError, match=r"there is no session 'x'.*; .*is not JSON.*; cannot read") as one:
        archive.find("x")
    assert len(str(one.value).splitlines()) == 1


def test_unreadable_folder_is_named(archive: SessionArchive, monkeypatch: pytest.MonkeyPatch) -> None:
    archive.folder.write_text("")
    assert archive.list() == [] and "Not a directory" in archive.unreadable_summary()
    archive.folder.unlink()
    keep(archive, 1)
    forbid(monkeypatch, archive.folder)
    with pytest.raises(SessionError, match=r"^there is no session 'x'; cannot read the folder .*: Per"):
        archive.find("x")


def forbid(monkeypatch: pytest.MonkeyPatch, closed: Path) -> None:
    """Simulate mode 000, which does not apply to root."""
    for name in ("open", "read_text", "iterdir"):
        usual = getattr(Path, name)

        def refuse(path: Path, *args: Any, usual: Any = usual, **named: Any) -> Any:
            if path == closed:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return usual(path, *args, **named)

        monkeypatch.setattr(Path, name, refuse)


def test_find_by_several_names(archive: SessionArchive, tmp_path: Path) -> None:
    first, second = keep(archive, 1, "Why is the sky blue?"), keep(archive, 2, "Ähnlich?")
    assert archive.find(first.id) == archive.find(first.id.upper()) == archive.file_for(first)
    assert archive.find("20260101-000002") == archive.file_for(second)
    assert archive.find(" why is the SKY blue? ") == archive.file_for(first)
    assert archive.find("ähnlich?") == archive.file_for(second)
    elsewhere = tmp_path / "talk.json"
    first.write(elsewhere)
    assert archive.find(str(elsewhere)) == elsewhere


def test_not_found(archive: SessionArchive) -> None:
    with pytest.raises(SessionError, match="none was saved"):
        archive.find("sky")
    keep(archive, 1, "Why is the sky blue?")
    keep(archive, 2, "A recipe")
    keep(archive, 3, "A recipe")
    with pytest.raises(
        SessionError, match=r"there is no session 'sky'.*000001-a1 \(Why is the sky blue\?\)"
    ) as one:
        archive.find("sky")
    assert "recipe" not in str(one.value)
    with pytest.raises(SessionError, match=r"several sessions are called 'a recipe'.*give an id"):
        archive.find("a recipe")
    with pytest.raises(SessionError, match="several"):
        archive.find("2026")
    for name in ("", "\0", "x" * 5000, "~nobody-at-all/x", "a\nb\x1b[0m", "\ud800"):
        with pytest.raises(SessionError) as caught:
            archive.find(name)
        assert len(str(caught.value).splitlines()) == 1 and "\x1b" not in str(caught.value)
