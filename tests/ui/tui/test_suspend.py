"""Ctrl+Z in a terminal with a shell, and without one."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from tests.support.exhaustive import sampled_params
from tests.support.tmux import HAS_TMUX, Tmux
from tests.ui.cli.program import DRIVER, ROOT

pytestmark = pytest.mark.skipif(not HAS_TMUX, reason="tmux is not installed")

VARIABLES = {"PS1": "shell> ", "PYTHONPATH": str(ROOT)}


def chat(folder: Path) -> str:
    """Shell command that starts a chat."""
    script = json.dumps({"answers": ["It is blue."]})
    variables = f"env OFFSPEC_DATA={shlex.quote(str(folder))}"
    return f"{variables} {shlex.join([sys.executable, '-m', DRIVER, script, 'chat', 'demo'])}"


def wait_for_title(terminal: Tmux, title: str) -> None:
    terminal.wait_until(lambda: terminal.title() == title, f"title {title!r}")


WAYS = ("itself", "with a parent in its job")


@pytest.mark.parametrize("way", sampled_params(WAYS, "with a parent in its job"))
def test_suspend_returns_to_the_shell_and_fg_resumes_the_chat(way: str, tmp_path: Path) -> None:
    line = chat(tmp_path) if way == "itself" else shlex.join(["sh", "-c", f"{chat(tmp_path)}; true"])
    (tmp_path / "run").write_text(line)
    with Tmux(
        ["bash", "--norc", "--noprofile", "-i"], {**VARIABLES, "RUN": str(tmp_path / "run")}
    ) as terminal:
        terminal.wait_for("shell>")
        before = terminal.title()
        terminal.send(". $RUN")
        terminal.wait_for("Enter sends")
        terminal.type("half a question")
        terminal.wait_for("half a question")
        wait_for_title(terminal, "a new conversation · offspec")
        terminal.press("C-z")
        terminal.wait_for("Stopped")
        wait_for_title(terminal, before)
        terminal.send("echo $((6 * 7))")
        terminal.wait_for("42")
        terminal.send("fg")
        terminal.wait_for("half a question")
        terminal.type(" is asked")
        terminal.wait_for("half a question is asked")
        wait_for_title(terminal, "a new conversation · offspec")
        terminal.press("Enter")
        terminal.wait_for("It is blue.")
        wait_for_title(terminal, "half a question is asked · offspec")
        terminal.press("C-q")
        terminal.wait_for("shell>")
        wait_for_title(terminal, before)


def test_suspend_without_a_shell_does_nothing(tmp_path: Path) -> None:
    with Tmux(["sh", "-c", f"exec setsid -c -w {chat(tmp_path)}"], VARIABLES) as terminal:
        terminal.wait_for("Enter sends")
        terminal.press("C-z")
        terminal.type("Why?")
        terminal.wait_for("Why?")
        terminal.press("Enter")
        terminal.wait_for("It is blue.")
