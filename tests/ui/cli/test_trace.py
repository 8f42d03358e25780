"""`offspec generate --trace FILE`: written however the run ends, refused before it begins."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from offspec import __version__
from offspec.core import trace as module
from offspec.core.errors import DiskFullError, ModelNotFoundError
from tests.support.fake_engine import Script, ScriptedEngine, ScriptedLoad
from tests.support.waiting import PATIENCE
from tests.ui.cli.program import ENDLESS, TEXT, start

Call = Callable[..., Result]


def names(file: Path) -> list[str]:
    """Names of the spans in the file."""
    return [event["name"] for event in content(file)["traceEvents"] if event["ph"] == "X"]


def content(file: Path) -> Any:
    return json.loads(file.read_text())


def test_trace_is_written_and_its_path_printed(offspec: Call, tmp_path: Path) -> None:
    file = tmp_path / "run [1].json"
    result = offspec("generate", "demo", "Why?", "--trace", str(file), "--memory", "1.5GB")
    assert (result.exit_code, result.stdout) == (0, TEXT + "\n")
    assert names(file) == ["prompt"]
    line = result.stderr.splitlines()[-1]
    size = file.stat().st_size
    assert line == f"timeline written to {file}, {size} B; open it at https://ui.perfetto.dev"
    about = content(file)["otherData"]
    assert (about["offspec"], about["model"], about["memory"]) == (__version__, "demo", 1_500_000_000)
    assert "Why?" not in file.read_text()
    quiet = offspec("generate", "demo", "Why?", "--quiet", "--trace", str(file))
    assert quiet.stderr == "[loading]\n"
    assert names(file) == ["prompt"]


def test_no_timeline_without_the_option(offspec: Call, load: ScriptedLoad) -> None:
    offspec("generate", "demo", "Why?")
    assert len(load.calls) == 1 and load.timeline is None


def test_error_keeps_the_recorded_spans(offspec: Call, engine: ScriptedEngine, tmp_path: Path) -> None:
    engine.answers = [Script(TEXT, fail_after=1, pass_tokens=1)]
    result = offspec("generate", "demo", "Why?", "--trace", str(tmp_path / "t.json"))
    assert (result.exit_code, result.stdout) == (1, "The\n")
    *_, note, error = result.stderr.splitlines()
    assert note.startswith("timeline written to") and error.startswith("error: read failed")
    assert names(tmp_path / "t.json") == ["prompt"]


def test_empty_trace_does_not_replace_a_file(offspec: Call, load: ScriptedLoad, tmp_path: Path) -> None:
    load.fail = ModelNotFoundError("no such model")
    (tmp_path / "t.json").write_text("old")
    assert offspec("generate", "missing/model", "Why?", "--trace", str(tmp_path / "t.json")).exit_code == 1
    assert (tmp_path / "t.json").read_text() == "old"


@pytest.mark.parametrize("fails", [False, True])
def test_full_disk(
    offspec: Call, engine: ScriptedEngine, tmp_path: Path, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write error does not hide the first error."""

    def write(*_: object) -> None:
        raise DiskFullError("the disk filled up: make room there")

    monkeypatch.setattr(module.Timeline, "write", write)
    engine.answers = [Script(TEXT, fail_after=1 if fails else None, pass_tokens=1)]
    result = offspec("generate", "demo", "Why?", "--trace", str(tmp_path / "t.json"))
    assert (result.exit_code, result.stdout) == (1, ("The" if fails else TEXT) + "\n")
    *_, note, error = result.stderr.splitlines()
    assert error.startswith("error: read failed" if fails else "error: the disk filled up: make room there")
    assert (note == "the timeline is lost: the disk filled up: make room there") == fails


def test_interrupt_keeps_the_recorded_spans(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    with start("generate", "demo", "Why?", "--trace", str(file), script=ENDLESS) as program:
        assert program.stdout
        assert program.stdout.readline() == "line 0\n"
        program.send_signal(signal.SIGINT)
        _, err = program.communicate(timeout=PATIENCE)
    assert program.returncode == 130
    stopped, note = err.splitlines()[-2:]
    assert stopped.startswith("stopped") and note.startswith("timeline written to")
    assert names(file) == ["prompt"] and os.listdir(tmp_path) == ["t.json"]
