"""Completions of a partly typed line."""

from pathlib import Path

import pytest

from offspec.chat.archive import SessionArchive, SessionEntry
from offspec.core.config import SOURCES
from offspec.ui.chat.commands import COMMANDS
from offspec.ui.chat.controller import ChatController
from offspec.ui.chat.handlers import run_command
from tests.ui.chat.talk import say


def completions(chat: ChatController, line: str) -> list[str]:
    return [completion.text for completion in chat.complete(line)]


def test_completion(chat: ChatController, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("system ", "set ", "seed ", "save ", "sessions", "sources ", "stats")
    assert completions(chat, "/s") == [f"/{name}" for name in names]
    assert len(completions(chat, "/")) == len(COMMANDS)
    assert completions(chat, "/help re") == ["/help retry"]
    assert completions(chat, "/set te") == ["/set temperature="]
    assert completions(chat, "/set top_k=5 top") == ["/set top_k=5 top_p=", "/set top_k=5 top_k="]
    assert completions(chat, "/set top_k=5 ign") == ["/set top_k=5 ignore_eos="]
    assert completions(chat, "/set ignore_eos=o") == ["/set ignore_eos=on", "/set ignore_eos=off"]
    assert completions(chat, "/set seed=") == ["/set seed=default", "/set seed=random"]
    assert completions(chat, "/set stop=n") == ["/set stop=none"]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--some--model" / "snapshots").mkdir(parents=True)
    assert completions(chat, "/draft ") == [
        f"/draft {name}" for name in (*SOURCES, "demo", "demo-wide", "some/model")
    ]
    assert completions(chat, "/draft suffix,SO") == ["/draft suffix,some/model"]
    assert completions(chat, "/sources o") == ["/sources on", "/sources off"]
    assert completions(chat, "/clear ") == completions(chat, "hello") == completions(chat, "//he") == []
    assert all(completion.help for completion in chat.complete("/"))


def test_conversations_are_listed_once_per_line(
    chat: ChatController, archive: SessionArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(chat, "Why is it so?")
    looked: list[int] = []
    look = archive.list

    def counted() -> list[SessionEntry]:
        looked.append(1)
        return look()

    monkeypatch.setattr(archive, "list", counted)
    for line in ("/load ", "/load w", "/load wh"):
        assert completions(chat, line) == ["/load Why is it so?"]
    assert len(looked) == 1
    assert completions(chat, "/lo") == ["/load "]
    completions(chat, "/load ")
    assert len(looked) == 2
    run_command(chat, "/help")
    completions(chat, "/load ")
    assert len(looked) == 3


def test_completion_of_names_and_files(
    chat: ChatController, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(chat, "Why is it so?")
    (saved,) = chat.complete("/load why")
    assert saved.text == "/load Why is it so?" and saved.help.startswith("1 question, ")
    for name in ("one.json", "two.gguf", "three.txt", ".hidden.json"):
        (tmp_path / name).touch()
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    assert completions(chat, "/save ./") == ["/save ./models/", "/save ./one.json", "/save ./sessions/"]
    assert completions(chat, "/attach t") == ["/attach two.gguf", "/attach three.txt"][::-1]
    assert completions(chat, "/attach ./th") == ["/attach ./three.txt"]
    assert completions(chat, f"/load {tmp_path}/o") == [f"/load {tmp_path}/one.json"]
    assert completions(chat, "/draft ./m") == ["/draft ./models/"]
    assert completions(chat, "/draft ./t") == ["/draft ./two.gguf"]
    assert completions(chat, "/draft suffix,./t") == ["/draft suffix,./two.gguf"]
    assert completions(chat, "/draft suffix,s") == ["/draft suffix,self", "/draft suffix,suffix"]
    assert (
        completions(chat, "/draft /no/such/folder/") == completions(chat, "/load ~nobody-of-that-name/") == []
    )
