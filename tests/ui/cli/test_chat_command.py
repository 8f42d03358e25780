"""`offspec chat`: how options map to a setup, and which user interface is chosen."""

import subprocess
import sys
from pathlib import Path

import pytest

from offspec.chat.archive import SessionArchive
from offspec.chat.conversation import Conversation, Message
from offspec.core.config import SamplingParams
from offspec.ui.chat.setup import ChatSetup
from offspec.ui.cli.main import app


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, ChatSetup, bool]]:
    """Chats that were started: terminal UI or lines, setup, and quiet. One is saved as shopping."""
    monkeypatch.setenv("OFFSPEC_DATA", str(tmp_path))
    talk = Conversation(model="demo", messages=[Message("user", "Why?")], title="shopping")
    talk.write(SessionArchive().file_for(talk))
    begun = list[tuple[str, ChatSetup, bool]]()

    def lines(setup: ChatSetup, *given: object, quiet: bool) -> None:
        begun.append(("lines", setup, quiet))

    def screen(setup: ChatSetup, *given: object) -> int:
        begun.append(("screen", setup, False))
        return 0

    monkeypatch.setattr("offspec.ui.cli.line_mode.run", lines)
    monkeypatch.setattr("offspec.ui.tui.run", screen)
    return begun


def call(*args: str) -> None:
    app(["chat", *args], prog_name="offspec", standalone_mode=False)


def test_options_become_a_setup(begun: list[tuple[str, ChatSetup, bool]]) -> None:
    call("demo", "--memory", "1GB", "--draft", "none", "--top-k", "5", "--stop", "END", "--quiet")
    how, setup, quiet = begun[0]
    assert (how, quiet) == ("lines", True)  # there is no terminal under a test
    assert (setup.config.model, setup.config.memory, setup.config.draft) == ("demo", 10**9, "none")
    own = SamplingParams(temperature=0.6, top_k=20)  # from the model
    params = SamplingParams(temperature=0.6, top_k=5, stop=("END",), max_tokens=2048)
    assert setup.sampling.apply_to(own) == params
    assert setup.resume is None and setup.system is None and setup.trees


def test_given_options_override_a_resumed_conversation(
    begun: list[tuple[str, ChatSetup, bool]],
) -> None:
    call("demo", "--resume", "--temperature", "0", "--max-tokens", "2048")
    call("demo", "--session", "shopping")
    (_, latest, _), (_, named, _) = begun[:2]
    assert latest.resume == "" and latest.overrides == {"temperature", "max_tokens"}
    call("demo", "--resume", "--greedy")
    assert begun[2][1].merge_params(SamplingParams(0.6, top_k=20)) == SamplingParams(top_k=20)
    assert (named.resume, named.overrides) == ("shopping", frozenset())


@pytest.mark.parametrize(
    ("stdin", "stdout", "term", "expected"),
    [
        (True, True, "xterm", "screen"),
        (False, True, "xterm", "lines"),
        (True, False, "xterm", "lines"),
        (True, True, "dumb", "lines"),
        (True, True, "", "lines"),
    ],
)
def test_terminal_ui_needs_a_terminal(
    begun: list[tuple[str, ChatSetup, bool]],
    monkeypatch: pytest.MonkeyPatch,
    stdin: bool,
    stdout: bool,
    term: str,
    expected: str,
) -> None:
    for name, is_terminal in (("stdin", stdin), ("stdout", stdout), ("stderr", True)):
        monkeypatch.setattr(f"sys.{name}.isatty", lambda answer=is_terminal: answer, raising=False)
    monkeypatch.setenv("TERM", term)
    if not term:
        monkeypatch.delenv("TERM")
    call("demo")
    assert begun[0][0] == expected


def test_largest_library_is_opened_before_torch_is_imported() -> None:
    program = (
        "import sys; from offspec.ui.chat.setup import preload_torch; preload_torch(); "
        "assert 'torch' not in sys.modules; print('libtorch_cpu' in open('/proc/self/maps').read())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
