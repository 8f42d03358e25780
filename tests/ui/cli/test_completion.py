"""Shell completion of a command-line word, through the protocol of the installed script."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from offspec.chat.archive import SessionArchive
from offspec.chat.conversation import Conversation, Message
from offspec.core.config import SOURCES
from offspec.ui.cli.main import app
from offspec_planners.hardware_rates import preset_names


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment with a cached Hub model, two conversations, a default, and files in this folder."""
    hub = tmp_path / "hub"
    for name in (
        "models--Qwen--Qwen3-0.6B/snapshots/abc",
        "datasets--a--b/snapshots/abc",
        "models--x--begun",
    ):
        (hub / name).mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    for name in ("DATA", "CONFIG", "CACHE"):
        monkeypatch.setenv(f"OFFSPEC_{name}", str(tmp_path / name.lower()))
    for title, ident in (("trip", "aaaa"), ("Why so?", "bbbb")):
        talk = Conversation(model="demo", messages=[Message("user", "Why?")], title=title)
        talk.id = ident
        talk.write(SessionArchive().file_for(talk))
    here = tmp_path / "here"
    (here / "Llama").mkdir(parents=True)
    for name in ("notes.txt", "one.gguf", "mine.json"):
        (here / name).touch()
    monkeypatch.chdir(here)
    return tmp_path


def offered(line: str) -> list[str]:
    """Return the completions for the partly typed last word of a line."""
    words = line.split(" ")
    variables = {"_OFFSPEC_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    done = CliRunner().invoke(app, [], env=variables, prog_name="offspec")
    assert done.exception is None or isinstance(done.exception, SystemExit), done
    return list(filter(None, done.output.split("\n")))


@pytest.mark.parametrize("command", ["chat", "generate", "plan", "pack", "distill", "serve"])
def test_local_models_are_completed(command: str) -> None:
    assert offered(f"offspec {command} ") == ["demo", "demo-wide", "Qwen/Qwen3-0.6B", "Llama/", "one.gguf"]
    assert offered(f"offspec {command} Q") == ["Qwen/Qwen3-0.6B"]
    assert offered(f"offspec {command} ./") == ["./Llama/", "./one.gguf"]


def test_batch_completes_the_model_last() -> None:
    assert offered("offspec batch in.jsonl out.jsonl Q") == ["Qwen/Qwen3-0.6B"]


def test_drafts_and_lists_of_drafts() -> None:
    assert offered("offspec chat demo --draft ") == [*SOURCES, "demo", "demo-wide", "Qwen/Qwen3-0.6B"]
    assert offered("offspec chat demo --draft suffix,Q") == ["suffix,Qwen/Qwen3-0.6B"]


def test_hardware_presets() -> None:
    presets = [name for name in preset_names() if name.startswith("rtx-40")]
    assert presets and offered("offspec plan demo --hardware rtx-40") == presets
    assert offered("offspec hardware rtx-40") == presets
    assert offered("offspec hardware l")[0] == "list"
    assert offered("offspec plan demo --hardware m")[-1] == "mine.json"


def test_conversations_have_names_without_quotes() -> None:
    assert sorted(offered("offspec chat demo --session ")) == ["bbbb", "trip"]


def test_keys_and_values_of_config() -> None:
    assert "draft" in offered("offspec config set ") and offered("offspec config set th") == ["theme"]
    assert offered("offspec config unset ") == []
    CliRunner().invoke(app, ["config", "set", "theme", "dark"])
    assert offered("offspec config unset ") == offered("offspec config get t") == ["theme"]
    assert offered("offspec config set theme ") == ["dark", "light"]
    assert offered("offspec config set dtype b") == ["bfloat16"]
    assert (
        offered("offspec config set model Q") == offered("offspec config set draft Q") == ["Qwen/Qwen3-0.6B"]
    )
    assert offered("offspec config set memory ") == []


def test_unreadable_folders_raise_nothing(home: Path) -> None:
    (home / "config").mkdir()
    (home / "config" / "config.toml").write_text("not = toml = at all")
    assert offered("offspec config unset ") == []
