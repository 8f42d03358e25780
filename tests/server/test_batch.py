"""Batches of requests from files: valid and invalid lines, results, and recovery from a kill."""

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from offspec.core.errors import ClosedError, DiskFullError, RequestError, StreamError
from offspec.core.events import Event, LoadProgress
from offspec.server import reply
from offspec.server.batch import results
from offspec.server.batch.lines import Line, read_line, read_lines
from offspec.server.batch.offline_run import BatchRun
from offspec.server.batch.results import ResultFile
from offspec.server.service import Service
from offspec.server.settings import Settings
from tests.support.fake_engine import Script, ScriptedEngine
from tests.support.tiny_models import tiny_engine, write_model
from tests.support.waiting import PATIENCE, wait_until

PLAIN: list[Any] = [
    {"id": "a", "prompt": "Why?", "max_tokens": 5},
    {"custom_id": "b", "messages": [{"role": "user", "content": "How?"}], "sampling_params": {"seed": 3}},
    {"prompt": "Where?", "n": 2},
]
WRAPPED = {
    "custom_id": "w",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "mine", "messages": [{"role": "user", "content": "When?"}], "temperature": 1},
}
WRONG: list[tuple[Any, str]] = [
    ("nonsense", "not valid JSON"),
    ([1], "must be an object, not a list"),
    ({"prompt": 3}, "prompt: it must be a string"),
    ({"id": "x"}, "either a prompt or messages"),
    ({"prompt": "a", "messages": []}, "either a prompt or messages"),
    ({"prompt": "a", "sampling_params": 3}, "sampling_params: it must be an object"),
    ({"prompt": "a", "tempature": 1}, "tempature"),
    ({"prompt": "a", "stream": True}, "do not stream"),
    ({**WRAPPED, "custom_id": "u", "url": "/v1/embeddings"}, "/v1/completions"),
    ({**WRAPPED, "custom_id": "m", "method": "GET"}, "method"),
    ({"custom_id": "y", "body": {}}, "missing"),
    ({**WRAPPED, "body": {"messages": []}}, "messages"),
]


def write_requests(path: Path, lines: Sequence[Any]) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def run(requests: Path, out: Path, engine: ScriptedEngine, reported: list[Event] | None = None) -> BatchRun:
    reported = [] if reported is None else reported
    with ResultFile(out) as file:
        batch = BatchRun(
            Service(engine.opened, Settings(served_model_names=("mine",))), file, reported.append
        )
        batch.run(read_lines(requests))
    return batch


def said(out: Path) -> dict[str, Any]:
    lines = list(map(json.loads, out.read_text().splitlines()))
    found = {line.get("custom_id") or line["id"]: line for line in lines}
    assert len(found) == len(lines), "duplicate id"
    return found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "the line is not valid JSON at byte 4"),
        ("[1]", "the line must be an object, not a list"),
        (json.dumps({**WRAPPED, "body": [1]}), "body must be an object, not a list"),
        (json.dumps({**WRAPPED, "body": {"messages": []}}), "messages must not be empty"),
        (json.dumps({"prompt": ["a", "b"]}), "prompt: it must be a string"),
    ],
)
def test_an_error_speaks_of_the_line_or_of_its_field(text: str, message: str) -> None:
    fault = read_line(7, text.encode()).fault
    assert fault is not None and fault.message == message


def test_id_of_null_counts_as_omitted() -> None:
    assert read_line(7, b'{"id": null, "prompt": "Why?"}').id == "line-7"


def test_batch_and_plain_line_formats(tmp_path: Path) -> None:
    requests = write_requests(tmp_path / "in", [*PLAIN, WRAPPED])
    reported = list[Event]()
    batch = run(requests, tmp_path / "out", ScriptedEngine(["Because it is so."]), reported)
    found = said(tmp_path / "out")
    assert {*found} == {"a", "b", "line-3", "w"}
    assert found["a"]["text"] == "Because it is so." and found["a"]["finish_reason"] == "stop"
    assert len(found["line-3"]["texts"]) == 2
    response = found["w"]["response"]
    assert (response["status_code"], found["w"]["error"]) == (200, None)
    assert response["body"]["choices"][0]["message"]["content"] == "Because it is so."
    assert batch.tokens == 5 * 4
    progress = [(event.done, event.total) for event in reported if isinstance(event, LoadProgress)]
    assert progress[-5:] == [(number, 4) for number in range(5)]


def test_responses_are_not_stored(tmp_path: Path) -> None:
    """Even if a line requests it. Tokens of their answers are counted, and seeds are derived from lines."""
    line = {
        "custom_id": "r",
        "method": "POST",
        "url": "/v1/responses",
        "body": {"input": "Why?", "store": True},
    }
    requests, engine = write_requests(tmp_path / "in", [line]), ScriptedEngine(["Because it is so."])
    batch = run(requests, tmp_path / "out", engine)
    body = said(tmp_path / "out")["r"]["response"]["body"]
    assert body["output"][0]["content"][0]["text"] == "Because it is so." and body["store"] is False
    assert batch.tokens == 4
    (read,) = read_lines(requests)
    assert engine.requests[0].params.seed == read.request("m")["seed"]


def test_invalid_line_fails_alone(tmp_path: Path) -> None:
    requests = write_requests(tmp_path / "in", ["", *(line for line, _ in WRONG), "  ", PLAIN[0]])
    *wrong, right = read_lines(requests)
    run(requests, tmp_path / "out", ScriptedEngine())
    found = said(tmp_path / "out")
    with ResultFile(tmp_path / "out") as file:
        assert file.done == {*found} and file.failed == {line.id for line in wrong}
    assert len(found) == len(wrong) + 1
    assert right.fault is None and found["a"]["text"]
    for line, (_, expected) in zip(wrong, WRONG, strict=True):
        reported = found[line.id]
        assert line.fault is not None and expected in line.fault.message
        assert expected in json.dumps(reported)
        assert reported.get("error") or reported["response"]["status_code"] >= 400


def test_unknown_model_fails_its_line(tmp_path: Path) -> None:
    other = {**WRAPPED, "custom_id": "o", "body": {**WRAPPED["body"], "model": "gpt"}}  # type: ignore[dict-item]
    run(write_requests(tmp_path / "in", [other, PLAIN[0]]), tmp_path / "out", ScriptedEngine())
    found = said(tmp_path / "out")
    assert found["o"]["response"]["status_code"] == 404 and found["a"]["text"]


def test_unusable_files(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"lines 1 and 2 of .* the same id, 'a'"):
        list(read_lines(write_requests(tmp_path / "in", [PLAIN[0], PLAIN[0]])))
    with pytest.raises(RequestError, match=r"line 1 of .* is not a batch result"):
        ResultFile(write_requests(tmp_path / "other", ["some text"]))
    with pytest.raises(RequestError, match="cannot write to"):
        ResultFile(tmp_path / "none" / "out")
    with ResultFile(tmp_path / "out"), pytest.raises(RequestError, match="another process is writing"):
        ResultFile(tmp_path / "out")
    ResultFile(tmp_path / "out").__exit__(None, None, None)


def test_interrupted_run_resumes(tmp_path: Path) -> None:
    """A line cut by a kill runs again; complete results do not."""
    requests, out = write_requests(tmp_path / "in", PLAIN), tmp_path / "out"
    run(requests, out, ScriptedEngine(["One."]))
    whole = out.read_bytes()
    out.write_bytes(whole[: whole.rindex(b"line-3") + 20])
    engine = ScriptedEngine(["Two."])
    reported = list[Event]()
    run(requests, out, engine, reported)
    found = said(out)
    progress = [(event.done, event.total) for event in reported if isinstance(event, LoadProgress)]
    assert progress[-2:] == [(2, 3), (3, 3)]
    assert found["a"]["text"] == "One." and found["line-3"]["texts"] == ["Two.", "Two."]
    assert len(engine.requests) == 2


def test_seeds_are_derived_from_lines(tmp_path: Path) -> None:
    """A second run, or another order, gives the same answers."""
    one, two = (list(read_lines(write_requests(tmp_path / "in", lines))) for lines in (PLAIN, PLAIN[::-1]))
    seeds = [{line.id: line.request("m")["seed"] for line in lines} for lines in (one, two)]
    assert seeds[0]["a"] == seeds[1]["a"] != seeds[0]["b"] == 3
    assert Line(1, "z", "", PLAIN[0], True).request("m")["seed"] != seeds[0]["a"]


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, out = write_requests(tmp_path / "in", PLAIN), tmp_path / "out"

    def full(fd: int, data: memoryview) -> None:
        if b'"b"' in bytes(data):
            results.os.write(fd, data[:9])  # type: ignore[attr-defined]
            raise OSError(28, "no space left on device")
        results.os.write(fd, data)  # type: ignore[attr-defined]

    with monkeypatch.context() as patch:
        patch.setattr(results, "write_all", full)
        with pytest.raises(DiskFullError):
            run(requests, out, ScriptedEngine())
    assert "b" not in said(out)
    run(requests, out, ScriptedEngine())
    assert {*said(out)} == {"a", "b", "line-3"}


def test_engine_failure(tmp_path: Path) -> None:
    """A single failure is an error of its line; several in a row end the run, and their lines run again."""
    error = StreamError("the disk is gone", file=Path("x"), offset=0)
    requests = write_requests(tmp_path / "in", [{"prompt": f"question {i}"} for i in range(6)])
    run(requests, tmp_path / "one", ScriptedEngine([Script("a", error=error, fail_after=0), *["b"] * 5]))
    found = said(tmp_path / "one")
    assert len(found) == 6 and sum("error" in line for line in found.values()) == 1
    with pytest.raises(ClosedError, match="the batch stopped at line"):
        run(requests, tmp_path / "all", ScriptedEngine([Script("a", error=error, fail_after=0)]))
    assert len(said(tmp_path / "all")) == 2


def test_late_failure_has_its_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No status is sent before the answer, unlike for a waiting client."""
    monkeypatch.setattr(reply, "_KEEP_ALIVE_S", 0)
    engine = ScriptedEngine([Script("one two", fail_after=0), "fine"], delay=0.01)
    run(write_requests(tmp_path / "in", [WRAPPED, PLAIN[0]]), tmp_path / "out", engine)
    found = said(tmp_path / "out")
    assert found["w"]["response"]["status_code"] == 500 and found["a"]["text"] == "fine"


def test_kill_at_any_moment(tmp_path: Path) -> None:
    """Every id occurs once in the end, with the result of an undisturbed run."""
    count, kills = 24, 3
    requests, out, whole = (
        write_requests(tmp_path / "in", _kill_lines(count)),
        tmp_path / "out",
        tmp_path / "whole",
    )
    command = [sys.executable, "-m", "tests.server.batch_program", str(requests)]
    undisturbed = subprocess.Popen([*command, str(whole)])
    chance, left = random.Random(3), list[int]()
    for enough in sorted(chance.sample(range(count - 1), kills)):
        process = subprocess.Popen([*command, str(out), str(min(enough + 4, count - 1))])
        wait_until(lambda: process.poll() is not None or _lines(out) > enough)  # noqa: B023
        time.sleep(chance.random() * 0.03)
        process.send_signal(signal.SIGKILL)
        assert process.wait(PATIENCE) == -signal.SIGKILL
        left.append(_lines(out))
    assert left[-1] < count and len(set(left)) > 1
    for process in (undisturbed, subprocess.Popen([*command, str(out)])):
        assert process.wait(2 * PATIENCE) == 0
    expected, found = said(whole), said(out)
    assert len(found) == count

    def texts(of: dict[str, Any]) -> dict[str, str]:
        return {name: line["response"]["body"]["choices"][0]["text"] for name, line in of.items()}

    assert texts(found) == texts(expected)


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _kill_lines(count: int) -> list[Any]:
    def body(number: int) -> dict[str, Any]:
        text = f"w{5 + number % 60} w7 w{9 + number // 60}"
        return {"prompt": text, "max_tokens": 24, "temperature": number % 2}

    given = {"method": "POST", "url": "/v1/completions"}
    return [{"custom_id": f"q{number}", **given, "body": body(number)} for number in range(count)]


@pytest.mark.usefixtures("drafters_stay")
def test_lines_are_batched(tmp_path: Path) -> None:
    """Several sequences give the same results as one, in fewer passes."""
    model = write_model(tmp_path / "model", num_hidden_layers=2)
    lines = [
        {"prompt": f"w{i} w{2 * i} w9", "max_tokens": 9, "seed": i, "temperature": 1} for i in range(5, 17)
    ]
    requests, found = (
        write_requests(tmp_path / "in", [{**lines[0], "n": 3}, *lines[1:]]),
        list[dict[str, Any]](),
    )
    for sequences in (1, 4):
        out = tmp_path / f"out{sequences}"
        engine = tiny_engine(model, "suffix", budget=8, sequences=sequences)
        service = Service(lambda notify, engine=engine: engine, Settings(served_model_names=("mine",)))  # type: ignore[misc]
        with ResultFile(out) as file:
            BatchRun(service, file, lambda event: None).run(read_lines(requests))
        found.append({"said": said(out), "passes": service.metrics.page()})
    assert found[0]["said"] == found[1]["said"] and len(found[0]["said"]) == len(lines)
    one, four = (_counted(each["passes"], "offspec_passes_total") for each in found)
    assert 0 < four < one / 2
    one, four = (_counted(each["passes"], "offspec_answer_tokens_total") for each in found)
    assert one == four


def _counted(page: bytes, name: str) -> float:
    return next(float(line.split()[1]) for line in page.decode().splitlines() if line.startswith(name + " "))
