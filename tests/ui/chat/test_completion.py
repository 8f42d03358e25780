"""What a line that is being typed may become."""

from pathlib import Path

import pytest

from offspec.chat.archive import Archive, Entry
from offspec.core.config import SOURCES
from offspec.ui.chat.commands import COMMANDS
from offspec.ui.chat.controller import Desk
from offspec.ui.chat.handlers import run_command
from tests.ui.chat.talk import say


def completions(desk: Desk, line: str) -> list[str]:
    return [completion.text for completion in desk.complete(line)]


def test_completion(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert completions(desk, "/s") == [
        "/system ",
        "/set ",
        "/seed ",
        "/save ",
        "/sessions",
        "/sources ",
        "/stats",
    ]
    assert len(completions(desk, "/")) == len(COMMANDS)
    assert completions(desk, "/help re") == ["/help retry"]
    assert completions(desk, "/set te") == ["/set temperature="]
    assert completions(desk, "/set top_k=5 top") == ["/set top_k=5 top_p=", "/set top_k=5 top_k="]
    assert completions(desk, "/draft ") == [f"/draft {name}" for name in SOURCES]
    assert completions(desk, "/sources o") == ["/sources on", "/sources off"]
    assert completions(desk, "/clear ") == completions(desk, "hello") == completions(desk, "//he") == []
    assert all(completion.help for completion in desk.complete("/"))


def test_conversations_are_looked_for_once_a_line(
    desk: Desk, archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(desk, "Why is it so?")
    looked: list[int] = []
    look = archive.list

    def counted() -> list[Entry]:
        looked.append(1)
        return look()

    monkeypatch.setattr(archive, "list", counted)
    for line in ("/load ", "/load w", "/load wh"):
        assert completions(desk, line) == ["/load Why is it so?"]
    assert len(looked) == 1
    assert completions(desk, "/lo") == ["/load "]
    completions(desk, "/load ")
    assert len(looked) == 2
    run_command(desk, "/help")
    completions(desk, "/load ")
    assert len(looked) == 3


def test_completion_of_names_and_files(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    say(desk, "Why is it so?")
    assert completions(desk, "/load why") == ["/load Why is it so?"]
    for name in ("one.json", "two.gguf", "three.txt", ".hidden.json"):
        (tmp_path / name).touch()
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    assert completions(desk, "/save ./") == ["/save ./models/", "/save ./one.json", "/save ./sessions/"]
    assert completions(desk, f"/load {tmp_path}/o") == [f"/load {tmp_path}/one.json"]
    assert completions(desk, "/draft ./m") == ["/draft ./models/"]
    assert completions(desk, "/draft ./t") == ["/draft ./two.gguf"]
    assert completions(desk, "/draft suffix,./t") == ["/draft suffix,./two.gguf"]
    assert completions(desk, "/draft suffix,s") == ["/draft suffix,substitute", "/draft suffix,suffix"]
    assert (
        completions(desk, "/draft /no/such/folder/") == completions(desk, "/load ~nobody-of-that-name/") == []
    )
