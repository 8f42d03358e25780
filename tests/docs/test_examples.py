"""The scripts in `examples`, run as a user would, with a small model."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import offspec
from tests.support.tiny_models import write_model

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run an example with arguments; settings make measurements unnecessary."""
    usual = offspec.load

    def load(model: str, **options: Any) -> offspec.Engine:
        return usual(model, budget=8, width=2, context=256, learn=False, **options)

    def run(name: str, *args: Path) -> None:
        monkeypatch.setattr(sys, "argv", [name, *map(str, args)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")

    monkeypatch.setattr(offspec, "load", load, raising=False)
    return run


def test_summaries(run: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path / "model")
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for file in files:
        file.write_text("w5 w6 w7")
    run("summarize.py", model, *files)
    first, answer, _, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{files[0]}, ") and first.endswith(" of 256 tokens:")
    assert second.startswith(f"{files[1]}, ") and " w" in answer
    assert len((EXAMPLES / "summarize.py").read_text().splitlines()) <= 25


def test_errors_are_one_line(run: Callable[..., None], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"^error: there is no file or folder .*nowhere: check the path"):
        run("summarize.py", tmp_path / "nowhere")
