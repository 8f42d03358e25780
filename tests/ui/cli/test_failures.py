"""Work that fails: one line on stderr, nothing on stdout, the right exit code, no traceback."""

from collections.abc import Callable

import pytest
from typer.testing import Result

from offspec.core.errors import ModelNotFoundError
from tests.support.fake_engine import Script, ScriptedEngine, ScriptedLoad
from tests.ui.cli.program import TEXT, error_line

Call = Callable[..., Result]


@pytest.mark.parametrize(
    "args",
    [("Why?", "--budget", "0"), ("Why?", "--bogus"), (" \n ",), ("", "--raw"), ("Why?", "and", "more"), ()],
)
def test_a_wrong_request_loads_nothing(offspec: Call, load: ScriptedLoad, args: tuple[str, ...]) -> None:
    result = offspec("generate", "demo", *args)
    assert (result.exit_code, result.stdout, load.asked) == (2, "", [])


def test_an_unknown_model(offspec: Call, load: ScriptedLoad) -> None:
    load.fail = ModelNotFoundError("no model 'missing/model': neither a folder\nnor a hub id")
    result = offspec("generate", "missing/model", "Why?")
    assert result.exit_code == 1
    assert error_line(result) == "error: no model 'missing/model': neither a folder nor a hub id"


def test_an_error_in_the_middle_keeps_the_text_and_closes_everything(
    offspec: Call, engine: ScriptedEngine
) -> None:
    engine.answers = [Script(TEXT, fail_after=1, pass_tokens=1)]
    result = offspec("generate", "demo", "Why?", "--quiet")
    assert result.exit_code == 1
    assert result.stdout == "The\n"
    assert engine.steps == ["loading", "answering", "stream closed", "engine closed"]
    assert "model.safetensors, offset 4096" in error_line(result)


def test_a_bug_is_not_dressed_up(offspec: Call, engine: ScriptedEngine) -> None:
    engine.answers = [Script(TEXT, fail_after=0, error=ZeroDivisionError("an honest bug"))]
    result = offspec("generate", "demo", "Why?")
    assert isinstance(result.exception, ZeroDivisionError)
    assert "error:" not in result.stderr
