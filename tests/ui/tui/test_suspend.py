"""Ctrl+Z in a terminal with a shell, and without one."""

import shlex
import sys
from pathlib import Path

import pytest

from tests.support.products import some
from tests.support.tmux import HAS_TMUX, Tmux

pytestmark = pytest.mark.skipif(not HAS_TMUX, reason="tmux is not installed")

CHAT = """
import sys
from pathlib import Path
from offspec.ui import tui
from offspec.chat.archive import Archive
from offspec.ui.chat.setup import Setup
from offspec.core.config import EngineConfig, SamplingParams
from tests.support.fake_engine import ScriptedEngine, ScriptedLoad
setup = Setup(EngineConfig(model="demo"), SamplingParams(max_tokens=2048))
sys.exit(tui.run(setup, ScriptedLoad(ScriptedEngine(["It is blue."])), Archive(Path(sys.argv[1]))))
"""
VARIABLES = {"PS1": "shell> ", "PYTHONPATH": ":".join(sys.path)}


def chat(folder: Path) -> list[str]:
    (folder / "chat.py").write_text(CHAT)
    return [sys.executable, str(folder / "chat.py"), str(folder / "sessions")]


WAYS = {"itself": "{}", "with a parent in its job": "sh -c '{}; true'"}


@pytest.mark.parametrize("way", some(WAYS, "with a parent in its job"))
def test_the_shell_gets_the_terminal_and_continues_the_chat(way: str, tmp_path: Path) -> None:
    (tmp_path / "run").write_text(WAYS[way].format(shlex.join(chat(tmp_path))))
    with Tmux(["bash", "--norc", "--noprofile", "-i"], VARIABLES) as terminal:
        terminal.wait_for("shell>")
        before = terminal.title()
        terminal.send(f". {tmp_path}/run")
        terminal.wait_for("Enter sends")
        terminal.type("half a question")
        terminal.wait_for("half a question")
        assert terminal.title() == "a new conversation · offspec"
        terminal.press("C-z")
        terminal.wait_for("Stopped")
        assert terminal.title() == before
        terminal.send("echo $((6 * 7))")
        terminal.wait_for("42")
        terminal.send("fg")
        terminal.wait_for("half a question")
        terminal.type(" is asked")
        terminal.wait_for("half a question is asked")
        assert terminal.title() == "a new conversation · offspec"
        terminal.press("Enter")
        terminal.wait_for("It is blue.")
        assert terminal.title() == "half a question is asked · offspec"
        terminal.press("C-q")
        terminal.wait_for("shell>")
        assert terminal.title() == before


def test_without_a_shell_the_chat_goes_on(tmp_path: Path) -> None:
    with Tmux(["sh", "-c", f"exec setsid -c -w {shlex.join(chat(tmp_path))}"], VARIABLES) as terminal:
        terminal.wait_for("Enter sends")
        terminal.press("C-z")
        terminal.type("Why?")
        terminal.wait_for("Why?")
        terminal.press("Enter")
        terminal.wait_for("It is blue.")
