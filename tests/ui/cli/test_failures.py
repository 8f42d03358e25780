"""What users get wrong: one line on stderr, nothing on stdout, the right exit code, no traceback."""

from collections.abc import Callable

import pytest
from typer.testing import Result

from offspec.core.errors import CapacityError, ModelNotFoundError
from tests.support.fake_engine import Script, ScriptedEngine, ScriptedLoad
from tests.ui.cli.program import TEXT, error_line

Call = Callable[..., Result]


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("Why?", "--budget", "0"), "budget"),
        (("Why?", "--width", "0"), "width"),
        (("Why?", "--context", "1"), "context"),
        (("Why?", "--memory", "lots"), "1.5GB"),
        (("Why?", "--memory", "0"), "memory"),
        (("Why?", "--draft-bits", "5"), "4 or 16"),
        (("Why?", "--temperature", "-1"), "temperature"),
        (("Why?", "--temperature", "nan"), "temperature"),
        (("Why?", "--top-p", "0"), "--top-p"),
        (("Why?", "--min-p", "2"), "--min-p"),
        (("Why?", "--max-tokens", "0"), "--max-tokens"),
        (("Why?", "--seed", "-1"), "seed"),
        (("Why?", "--stop", ""), "stop"),
        (("Why?", "--raw", "--system", "x"), "--raw"),
        (("",), "empty"),
        ((" \n ",), "empty"),
        (("", "--raw"), "empty"),
        (("Why?", "--verify", "sequoia"), "--tree sequoia"),
        (("Why?", "--verify", "sequoia", "--tree", "sequoia", "--draft", "suffix"), "takes one draft"),
        (
            ("Why?", "--verify", "sequoia", "--tree", "sequoia", "--temperature", "1", "--check"),
            "--check compares tokens",
        ),
        ((), "empty"),  # standard input is at its end
    ],
)
def test_a_wrong_request_is_one_line_before_anything_is_loaded(
    offspec: Call, load: ScriptedLoad, args: tuple[str, ...], named: str
) -> None:
    result = offspec("generate", "demo", *args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert named in error_line(result)
    assert not load.asked


def test_bytes_that_are_not_text(offspec: Call) -> None:
    result = offspec("generate", "demo", input=b"caf\xe9")
    assert result.exit_code == 2
    assert "UTF-8" in error_line(result)


@pytest.mark.parametrize(
    "args",
    [
        ("generate",),
        ("generate", "demo", "Why?", "--bogus"),
        ("generate", "demo", "Why?", "--top-k", "many"),
        ("generate", "demo", "Why?", "--dtype", "int3"),
        ("generate", "demo", "Why?", "--verify", "hope"),
        ("generate", "demo", "Why?", "--device", "tpu"),
        ("generate", "demo", "Why?", "--device", "cuda:0,cpu"),
        ("generate", "demo", "Why?", "--cpu-layers", "few"),
        ("generate", "demo", "Why?", "and", "more"),
        ("levitate",),
    ],
)
def test_usage_errors(offspec: Call, load: ScriptedLoad, args: tuple[str, ...]) -> None:
    result = offspec(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Usage: offspec" in result.stderr
    assert not load.asked


def test_an_unknown_model(offspec: Call, load: ScriptedLoad) -> None:
    load.fail = ModelNotFoundError("no model 'missing/model': neither a folder\nnor a hub id")
    result = offspec("generate", "missing/model", "Why?")
    assert result.exit_code == 1
    assert error_line(result) == "error: no model 'missing/model': neither a folder nor a hub id"


def test_a_memory_cap_that_is_too_small(offspec: Call, load: ScriptedLoad) -> None:
    load.fail = CapacityError("needs 900 MB, was given 100 MB", needed=900_000_000, given=100_000_000)
    result = offspec("generate", "demo", "Why?", "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert error_line(result) == "error: needs 900 MB, was given 100 MB"


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
