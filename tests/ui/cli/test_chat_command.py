"""`offspec chat`: what its options become, and which user interface is chosen."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offspec.ui.chat.setup import Setup
from offspec.ui.cli import chat
from offspec.ui.cli.main import app


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Setup, dict[str, Any]]]:
    """What chats were begun with."""
    monkeypatch.setenv("OFFSPEC_DATA", str(tmp_path))
    calls: list[tuple[Setup, dict[str, Any]]] = []
    monkeypatch.setattr(chat, "_begin", lambda setup, **how: calls.append((setup, how)))
    return calls


def call(*args: str) -> int:
    return CliRunner().invoke(app, ["chat", *args], prog_name="offspec").exit_code


def test_options_become_a_setup(begun: list[tuple[Setup, dict[str, Any]]]) -> None:
    assert call("demo", "--memory", "1GB", "--draft", "none", "--top-k", "5", "--stop", "END", "--quiet") == 0
    setup, how = begun[0]
    assert (setup.config.model, setup.config.memory, setup.config.draft) == ("demo", 10**9, "none")
    assert (setup.params.top_k, setup.params.stop, setup.params.max_tokens) == (5, ("END",), 2048)
    assert setup.resume is None and setup.system is None and setup.trees
    assert how == {"plain": True, "quiet": True}  # there is no terminal under a test


def test_only_what_was_given_goes_over_a_resumed_conversation(
    begun: list[tuple[Setup, dict[str, Any]]],
) -> None:
    call("demo", "--resume", "--temperature", "0", "--max-tokens", "2048")
    assert begun[0][0].resume == ""
    assert begun[0][0].given == {"temperature", "max_tokens"}
    call("demo", "--session", "shopping")
    assert begun[1][0].resume == "shopping"
    assert begun[1][0].given == frozenset()


@pytest.mark.parametrize(
    ("stdin", "stdout", "term", "screen"),
    [
        (True, True, "xterm", True),
        (False, True, "xterm", False),
        (True, False, "xterm", False),
        (True, True, "dumb", False),
        (True, True, None, False),
    ],
)
def test_the_terminal_ui_needs_a_terminal(
    monkeypatch: pytest.MonkeyPatch, stdin: bool, stdout: bool, term: str | None, screen: bool
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: stdin, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: stdout, raising=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    if term is None:
        monkeypatch.delenv("TERM", raising=False)
    else:
        monkeypatch.setenv("TERM", term)
    assert chat._has_screen() is screen


def test_the_largest_library_is_open_before_torch_is_imported() -> None:
    program = (
        "import sys; from offspec.ui.chat.setup import preload_torch; preload_torch(); "
        "assert 'torch' not in sys.modules; print('libtorch_cpu' in open('/proc/self/maps').read())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
