"""`offspec batch` as a command: options, output, and exit codes."""

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from offspec.core.config import SamplingParams
from offspec.server.batch.lines import Line
from offspec.ui import interrupt
from tests.support.fake_engine import ScriptedLoad
from tests.support.waiting import PATIENCE
from tests.ui.cli.program import ENDLESS, error_line, start

Program = Callable[..., Result]


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"id": name, "prompt": "Why?"}) + "\n" for name in "ab"))
    return path


def test_answers_and_messages(offspec: Program, load: ScriptedLoad, requests: Path) -> None:
    out = requests.with_name("out.jsonl")
    result = offspec("batch", str(requests), str(out), "demo", "--temperature", "0.5")
    assert result.exit_code == 0 and not result.stdout
    assert f"2 results are in {out}; " in result.stderr
    assert "sampling defaults: temperature 0.5\n" in result.stderr
    assert result.stderr.count("reads are buffered: this file system [tmpfs] has no O_DIRECT\n") == 1
    assert {json.loads(line)["id"] for line in out.read_text().splitlines()} == {"a", "b"}
    again = offspec("batch", str(requests), str(out), "demo")
    assert again.exit_code == 0 and "2 of 2 results are already in" in again.stderr
    assert len(out.read_text().splitlines()) == 2


def test_lines_use_the_models_sampling_defaults(offspec: Program, load: ScriptedLoad, requests: Path) -> None:
    load.engine.sampling_defaults = SamplingParams(temperature=0.6, top_k=20)
    with requests.open("a") as file:
        file.write('{"id": "c", "prompt": "Why?", "temperature": 0}\n')
    result = offspec("batch", str(requests), str(requests.with_name("out.jsonl")), "demo")
    used = [(each.params.temperature, each.params.top_k) for each in load.engine.requests]
    assert sorted(used) == [(0.0, 20), (0.6, 20), (0.6, 20)]
    line = "temperature 0.6, top_k 20 (from generation_config.json); --greedy for temperature 0"
    assert f"sampling defaults: {line}\n" in result.stderr
    out = requests.with_name("greedy.jsonl")
    assert offspec("batch", str(requests), str(out), "demo", "--greedy").exit_code == 0
    assert {each.params.greedy for each in load.engines[1].requests} == {True}


def test_validate_loads_nothing(offspec: Program, load: ScriptedLoad, requests: Path) -> None:
    result = offspec("batch", str(requests), "--validate")
    assert (result.exit_code, result.stdout) == (0, "all 2 requests are valid\n")
    requests.write_text('{"prompt": 3}\nnonsense\n{"prompt": "Why?"}\n')
    result = offspec("batch", str(requests), "--validate")
    assert result.exit_code == 2
    first, second, last = result.stderr.splitlines()
    assert first.startswith("line 1: prompt: it must be a string") and second.startswith(
        "line 2: the line is not valid JSON"
    )
    assert last == f"error: 2 of 3 lines of {requests} are invalid; correct or remove them"


def test_validate_refuses_what_a_run_refuses(offspec: Program, load: ScriptedLoad, requests: Path) -> None:
    message = {"role": "user", "content": "Why?"}
    bodies = [
        ("/v1/chat/completions", {"messages": [message], "temperature": -1}),
        ("/v1/chat/completions", {"messages": [{"role": "poet", "content": "Why?"}]}),
        ("/v1/chat/completions", {"messages": [message], "response_format": {"type": "json_schema"}}),
        ("/v1/completions", {"prompt": "Why?", "top_p": 5}),
        ("/v1/completions", {"prompt": ["Why?", 3]}),
        ("/v1/responses", {"input": "Why?", "temperature": -1}),
        ("/v1/responses", {"input": [message], "background": True}),
    ]
    lines = [
        json.dumps({"custom_id": str(at), "method": "POST", "url": url, "body": body})
        for at, (url, body) in enumerate(bodies)
    ]
    good = json.dumps({"prompt": "Why?", "temperature": 0.5})
    requests.write_text("\n".join([*lines, good]))
    validated = offspec("batch", str(requests), "--validate")
    assert (validated.exit_code, load.calls) == (2, [])
    *faults, last = validated.stderr.splitlines()
    assert last == f"error: 7 of 8 lines of {requests} are invalid; correct or remove them"
    out = requests.with_name("out.jsonl")
    assert offspec("batch", str(requests), str(out), "demo", "--quiet").exit_code == 0
    kept = [json.loads(line) for line in out.read_text().splitlines()]
    errors = {
        int(line["custom_id"]): line["response"]["body"]["error"]["message"]
        for line in kept
        if "custom_id" in line
    }
    assert faults == [f"line {at + 1}: {errors[at]}" for at in range(len(bodies))]


def test_file_without_a_valid_line_loads_nothing(
    offspec: Program, load: ScriptedLoad, requests: Path
) -> None:
    """No result is saved either, so that corrected lines with the same ids still run."""
    out = requests.with_name("out.jsonl")
    requests.write_text('{"prompt": 3}\n' * 12)
    result = offspec("batch", str(requests), str(out), "demo")
    first, *_, more, last = result.stderr.splitlines()
    assert first.startswith("line 1: prompt: it must be a string") and more.startswith("and 2 more lines")
    assert last == f"error: 12 of 12 lines of {requests} are invalid; correct or remove them"
    assert (result.exit_code, load.calls, out.exists()) == (2, [], False)
    requests.write_text("\n")
    result = offspec("batch", str(requests), str(out), "demo")
    assert (result.exit_code, load.calls) == (2, []) and "has no requests" in error_line(result)


def test_invalid_lines_are_named(offspec: Program, load: ScriptedLoad, requests: Path) -> None:
    out = requests.with_name("out.jsonl")
    requests.write_text('{"prompt": "Why?"}\nnonsense\n')
    result = offspec("batch", str(requests), str(out), "demo")
    assert result.exit_code == 0 and result.stderr.startswith("line 2: the line is not valid JSON")
    assert f"2 results are in {out}, 1 of them errors; " in result.stderr
    with requests.open("a") as file:
        file.write("more nonsense\n")
    loaded = len(load.calls)
    assert offspec("batch", str(requests), str(out), "demo", "--quiet").exit_code == 1
    assert len(load.calls) == loaded and len(out.read_text().splitlines()) == 3
    out = requests.with_name("another.jsonl")
    requests.write_text('{"prompt": "Why?", "model": "another"}\n')
    result = offspec("batch", str(requests), str(out), "demo")
    assert result.exit_code == 1 and "all lines failed" in result.stderr
    assert "1 result is in" in result.stderr and "another" in out.read_text()
    again = offspec("batch", str(requests), str(out), "demo")
    assert again.exit_code == 0 and len(out.read_text().splitlines()) == 1  # no line runs again
    assert "1 of them errors (1 from earlier runs: delete those lines to retry them)" in again.stderr


def test_errors_of_earlier_runs_count(offspec: Program, load: ScriptedLoad, requests: Path) -> None:
    """In both formats; a line whose result was deleted runs again."""
    out = requests.with_name("out.jsonl")
    body = {"messages": [{"role": "user", "content": "Why?"}]}
    wrapped = {"method": "POST", "url": "/v1/chat/completions"}
    lines: list[dict[str, object]] = [
        {"id": "a", "prompt": "Why?", "model": "another"},
        {"custom_id": "b", **wrapped, "body": {**body, "model": "another"}},
        {"custom_id": "c", **wrapped, "body": body},
        {"id": "d", "prompt": "Why?"},
    ]
    requests.write_text("".join(f"{json.dumps(line)}\n" for line in lines[:3]))
    first = offspec("batch", str(requests), str(out), "demo")
    assert f"3 results are in {out}, 2 of them errors; " in first.stderr
    requests.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    result = offspec("batch", str(requests), str(out), "demo")
    assert f"4 results are in {out}, 2 of them errors (2 from earlier runs: " in result.stderr
    assert result.exit_code == 0
    kept = [line for line in out.read_text().splitlines() if '"custom_id": "b"' not in line]
    out.write_text("".join(f"{line}\n" for line in kept))
    result = offspec("batch", str(requests), str(out), "demo", "--alias", "another")
    assert f"4 results are in {out}, 1 of them errors (1 from earlier runs: " in result.stderr


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("nowhere.jsonl --validate", "cannot read nowhere.jsonl: No such file or directory"),
        (
            "demo IN out.jsonl",
            "out.jsonl is not a model; the model is the last argument: offspec batch IN.jsonl",
        ),
        ("IN", "name a file for the results and a model"),
        ("IN IN demo", "is the file of requests"),
        ("IN /nowhere/out demo", "cannot write to /nowhere/out"),
        ("IN OUT demo --ray-actors 2", "add --ray, or omit --ray-actors"),
        ("IN OUT demo --top-p 3", "--top-p must be"),
    ],
)
def test_usage_errors(
    offspec: Program, load: ScriptedLoad, requests: Path, given: str, expected: str
) -> None:
    named = {"IN": str(requests), "OUT": str(requests.with_name("out"))}
    result = offspec("batch", *(named.get(word, word) for word in given.split()))
    assert result.exit_code in (1, 2) and expected in error_line(result)


def test_ctrl_c_explains_how_to_resume(requests: Path) -> None:
    out = requests.with_name("out")
    with start("batch", str(requests), str(out), "demo", script=ENDLESS) as program:
        assert program.stderr
        assert any("[answering" in line for line in iter(program.stderr.readline, ""))
        program.send_signal(signal.SIGINT)
        _, stderr = program.communicate(timeout=PATIENCE)
    assert program.returncode == 130 and "Traceback" not in stderr
    assert (
        "0 of 2 results are in" in stderr
        and "run the same command to resume" in stderr
        and "[engine closed]" in stderr
    )


def test_ctrl_c_in_the_middle_of_a_task(
    offspec: Program,
    load: ScriptedLoad,
    requests: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """asyncio would print an exception raised there."""

    def struck(line: Line, model: str) -> dict[str, Any]:
        signal.raise_signal(signal.SIGINT)
        return make(line, model)

    make = Line.request
    monkeypatch.setattr(Line, "request", struck)
    monkeypatch.setattr(interrupt, "_state", interrupt._State(active=True))
    before = signal.signal(signal.SIGINT, interrupt._on_signal)
    try:
        result = offspec("batch", str(requests), str(requests.with_name("out")), "demo")
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.exit_code == 130 and "0 of 2 results are in" in result.stderr
    assert "Traceback" not in result.stderr and not caplog.records


@pytest.mark.parametrize("installed", [False, True])
def test_table_output(
    offspec: Program, load: ScriptedLoad, requests: Path, installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made from the lines at the end; a second run gives the same table."""
    out = requests.with_name("out.parquet")
    if not installed:
        monkeypatch.setattr("offspec.server.batch.results.find_spec", lambda name: None)
        result = offspec("batch", str(requests), str(out), "demo")
        assert result.exit_code == 2 and "pyarrow is not installed" in error_line(result)
        return
    parquet = pytest.importorskip("pyarrow.parquet")
    load.engine.answers = ["One\u2028line.", "Two."]
    for _ in range(2):
        assert offspec("batch", str(requests), str(out), "demo").exit_code == 0
        table = parquet.read_table(out).to_pylist()
        lines = requests.with_name("out.parquet.jsonl").read_text().split("\n")[:-1]
        assert table == [json.loads(line) for line in lines] and len(table) == 2
        assert table[0]["text"] == "One\u2028line."


def test_ray_is_missing(
    offspec: Program, load: ScriptedLoad, requests: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is reported before anything is loaded; the model may be missing on this machine."""
    monkeypatch.setitem(sys.modules, "ray", None)
    out = requests.with_name("out.jsonl")
    result = offspec("batch", str(requests), str(out), "/elsewhere/model", "--ray", "auto")
    assert result.exit_code == 2 and "run: pip install '.[ray]'" in error_line(result)
