"""Examples of the README and the docs: Python runs as printed, with a small model for the one that is named,
and commands have the options that are printed.
"""

import re
import shlex
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer

import offspec
from offspec.ui.cli.main import app
from tests.support.tiny_models import write_model
from tests.support.tokenizers import byte_level, saved

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("quickstart", "python", "drafts", "chat", "cli")),
]


def _blocks(language: str) -> Iterator[tuple[str, str]]:
    """Fenced blocks of all pages: location and text."""
    for page in PAGES:
        found = re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
        yield from ((f"{page.name}-{place}", text) for place, text in enumerate(found))


EXAMPLES = dict(_blocks("python"))
COMMANDS = [line for _, text in _blocks("") for line in text.splitlines() if line.startswith("offspec ")]
IN_TABLES = [
    command
    for page in PAGES[:2]
    for command in re.findall(r"^\|.*`(offspec [^`]+)`", page.read_text("utf-8"), re.MULTILINE)
]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., offspec.Engine]:
    """`offspec.load` with another path, and settings that make measurements unnecessary."""
    folder = tmp_path_factory.mktemp("readme")
    words, letters = write_model(folder / "words"), write_model(folder / "letters", vocab_size=352)
    saved(
        byte_level(), letters, chat_template="{{ messages[0]['content'] }}"
    )  # in words that JSON cannot contain
    usual = offspec.load

    def load(model: str, *, letter: bool = False, **options: Any) -> offspec.Engine:
        assert model == "path-or-hub-id"
        options = {"draft": "suffix", **options}  # auto would quantize a copy each time
        return usual(str(letters if letter else words), budget=16, width=4, learn=False, **options)

    return load


def test_there_are_examples() -> None:
    assert any(name.startswith("README") for name in EXAMPLES)
    assert any("session.send" in code for code in EXAMPLES.values())
    assert len(COMMANDS) >= 12 and len(IN_TABLES) >= 12


@pytest.mark.exhaustive
@pytest.mark.parametrize("code", EXAMPLES.values(), ids=EXAMPLES)
def test_examples_run(
    code: str,
    load: Callable[..., offspec.Engine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    formats = "Constraint" in code
    monkeypatch.setattr(offspec, "load", partial(load, letter=formats), raising=False)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "example", "exec"), {"__name__": "example"})
    printed = capsys.readouterr().out
    assert (
        "print(" not in code or re.search(r"\bw\d+\b", printed) or (formats and int(printed) >= 0)
    )  # a word of the small model
    assert "session.save" not in code or (tmp_path / "sky.json").exists()
    assert "session.rewind" not in code or "removed: And in the evening?" in printed


@pytest.mark.parametrize("line", COMMANDS + IN_TABLES)
def test_commands_have_the_printed_options(line: str) -> None:
    name, *words = shlex.split(line, comments=True)[1:]
    words = words[: words.index(">")] if ">" in words else words
    group: Any = typer.main.get_command(app)
    assert group.commands[name].make_context(name, words).info_name == name  # raises for unknown options
