"""The Python in the README runs as it stands, with a small model in place of the one that is named there."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import offspec
from tests.support.tiny_models import write_model

README = Path(__file__).parents[2] / "README.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README.read_text("utf-8"), re.MULTILINE | re.DOTALL)


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
    assert len(EXAMPLES) >= 2 and any("session.send" in code for code in EXAMPLES)


@pytest.mark.parametrize("code", EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_runs(
    code: str,
    load: Callable[..., offspec.Engine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(offspec, "load", load, raising=False)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {"__name__": "example"})
    printed = capsys.readouterr().out
    assert re.search(r"\bw\d+\b", printed)  # a word of the small model's
    if "session.save" in code:
        assert (tmp_path / "sky.json").exists() and "taken back: And in the evening?" in printed
