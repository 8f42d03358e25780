"""Examples of the README and the docs: Python runs as printed, with a small model for the one that is named,
and commands have the options that are printed.
"""

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import offspec
from offspec.ui.cli.main import app
from tests.support.tiny_models import write_model

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("python", "drafts", "chat"))]


def _blocks(language: str) -> Iterator[tuple[str, str]]:
    """Fenced blocks of all pages: where each is from, and its text."""
    for page in PAGES:
        found = re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
        yield from ((f"{page.name}-{place}", text) for place, text in enumerate(found))


EXAMPLES = dict(_blocks("python"))
COMMANDS = [line for _, text in _blocks("") for line in text.splitlines() if line.startswith("offspec ")]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., offspec.Engine]:
    """`offspec.load` with another path, and settings that need not be measured first."""
    folder = write_model(tmp_path_factory.mktemp("readme") / "model")
    usual = offspec.load

    def load(model: str, **options: Any) -> offspec.Engine:
        assert model == "path-or-hub-id"
        return usual(str(folder), budget=16, width=4, learn=False, **options)

    return load


def test_there_are_examples() -> None:
    readme = [code for name, code in EXAMPLES.items() if name.startswith("README")]
    assert len(readme) >= 2 and any("session.send" in code for code in readme)
    assert len(COMMANDS) >= 12


@pytest.mark.parametrize("code", EXAMPLES.values(), ids=EXAMPLES)
def test_an_example_runs(
    code: str,
    load: Callable[..., offspec.Engine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(offspec, "load", load, raising=False)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "example", "exec"), {"__name__": "example"})
    printed = capsys.readouterr().out
    assert "print(" not in code or re.search(r"\bw\d+\b", printed)  # a word of the small model's
    assert "session.save" not in code or (tmp_path / "sky.json").exists()
    assert "session.rewind" not in code or "removed: And in the evening?" in printed


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_has_these_options(line: str) -> None:
    name, *words = shlex.split(line, comments=True)[1:]
    words = words[: words.index(">")] if ">" in words else words
    group: Any = typer.main.get_command(app)
    assert (
        group.commands[name].make_context(name, words).info_name == name
    )  # raises for what it does not know
