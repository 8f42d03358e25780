"""OpenAI's Files and Batches APIs, with OpenAI's own client."""

import asyncio
import json
import os
import random
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from signal import Signals
from typing import Any

import openai
import pytest
from openai.types import Batch

from offspec.core.errors import StreamError
from offspec.server.batch.jobs import batches_folder
from offspec.server.batch.lines import read_lines
from tests.support.fake_engine import PassGate, Script, ScriptedEngine
from tests.support.live_server import NAME, LiveServer
from tests.support.waiting import PATIENCE, wait_until

CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder for the test."""
    monkeypatch.setenv("OFFSPEC_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(["Because it is so."])


@pytest.fixture
def server(engine: ScriptedEngine, data: Path) -> Iterator[LiveServer]:
    with LiveServer(engine) as server:
        yield server


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server for tests that do not change it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFSPEC_DATA", str(tmp_path_factory.mktemp("shared")))
        with LiveServer(ScriptedEngine(), upload_bytes=40_000) as server:
            yield server


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def line(name: str, text: str = "Why?", **body: Any) -> dict[str, Any]:
    fields = {"model": NAME, "messages": [{"role": "user", "content": text}], **body}
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": fields}


def text_of(lines: list[Any]) -> bytes:
    return "".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in lines).encode()


def upload(client: openai.OpenAI, lines: list[Any]) -> str:
    return client.files.create(file=("asked.jsonl", text_of(lines)), purpose="batch").id


def begin(client: openai.OpenAI, lines: list[Any], **more: Any) -> Batch:
    given: Any = {"completion_window": "24h", "endpoint": CHAT, **more}
    return client.batches.create(input_file_id=upload(client, lines), **given)


def ended(client: openai.OpenAI, id: str) -> Batch:
    last = "completed", "failed", "cancelled"
    wait_until(lambda: client.batches.retrieve(id).status in last, "the end of the batch")
    return client.batches.retrieve(id)


def results(client: openai.OpenAI, id: str | None) -> dict[str, Any]:
    if id is None:
        return {}
    lines = list(map(json.loads, client.files.content(id).text.splitlines()))
    found = {each["custom_id"]: each["response"] for each in lines}
    assert len(found) == len(lines), "duplicate id"
    return found


def test_files_api(client: openai.OpenAI, data: Path) -> None:
    text = text_of([line("a")])
    made = client.files.create(
        file=("asked.jsonl", text), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    other = client.files.create(file=("ö\n.jsonl", text), purpose="batch")
    assert (made.object, made.bytes) == ("file", len(text))
    assert (made.filename, made.purpose) == ("asked.jsonl", "batch")
    assert made.expires_at == made.created_at + 3600 and other.expires_at == other.created_at + 30 * 86400
    assert client.files.retrieve(made.id) == made
    assert [each.id for each in client.files.list()] == [other.id, made.id]
    assert [each.id for each in client.files.list(order="asc", limit=1)] == [made.id, other.id]
    assert not client.files.list(purpose="batch_output").data
    assert client.files.content(made.id).content == client.files.content(other.id).content == text
    assert client.files.delete(made.id).deleted
    for gone in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            gone(made.id)
    folder = batches_folder(NAME)
    assert data in folder.parents and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert not list(folder.glob(f"{made.id}*"))


def test_batch(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    lines = [line("a"), line("b", temperature=-1), line("c", n=2), line("d", model="gpt")]
    batch = begin(client, lines, metadata={"for": "tests"})
    assert (batch.object, batch.endpoint, batch.completion_window) == ("batch", CHAT, "24h")
    assert (batch.status, batch.output_file_id, batch.metadata) == ("validating", None, {"for": "tests"})
    batch = ended(client, batch.id)
    assert batch.status == "completed" and batch.errors is None and batch.model == NAME
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 4, "completed": 2, "failed": 2}
    moments = (batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at)
    assert None not in moments and list(moments) == sorted(moments)  # type: ignore[type-var]
    answers, errors = (results(client, id) for id in (batch.output_file_id, batch.error_file_id))
    assert {*answers} == {"a", "c"} and {*errors} == {"b", "d"}
    assert answers["a"]["body"]["choices"][0]["message"]["content"] == "Because it is so."
    assert [errors[name]["status_code"] for name in "bd"] == [400, 404]
    assert "temperature" in errors["b"]["body"]["error"]["message"]
    bodies = [answer["body"]["usage"] for answer in answers.values()]
    assert batch.usage is not None
    assert batch.usage.input_tokens == sum(each["prompt_tokens"] for each in bodies) > 0
    assert batch.usage.output_tokens == sum(each["completion_tokens"] for each in bodies) == 12
    file = client.files.retrieve(batch.output_file_id or "")
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert file.bytes == len(client.files.content(file.id).content)
    assert [each.id for each in client.batches.list()] == [batch.id]


def test_answers_equal_those_of_single_requests(tiny_folder: Path) -> None:
    """They also equal those of `offspec batch`, which gives lines the same seeds."""
    from tests.support.tiny_models import tiny_engine

    lines = [
        line(f"q{number}", f"w{number + 5} w7", max_tokens=6, temperature=number % 2) for number in range(4)
    ]
    with LiveServer(tiny_engine(tiny_folder)) as server, server.client() as client:
        answers = results(client, ended(client, begin(client, lines).id).output_file_id)
        path = tiny_folder.parent / "asked.jsonl"
        path.write_bytes(text_of(lines))
        for each in read_lines(path):
            alone = client.chat.completions.create(**each.request(NAME))
            assert answers[each.id]["body"]["choices"] == [choice.to_dict() for choice in alone.choices]


def test_responses_in_batches(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    """They may continue a stored response, and are not stored themselves."""
    kept = client.responses.create(model=NAME, input="Why?")
    wrapped = {"method": "POST", "url": "/v1/responses"}
    bodies: list[dict[str, Any]] = [
        {"model": NAME, "input": "How?", "store": True},
        {"input": "And?", "previous_response_id": kept.id},
        {"input": "When?", "previous_response_id": "resp_x"},
    ]
    lines = [{"custom_id": name, **wrapped, "body": body} for name, body in zip("abc", bodies, strict=True)]
    batch = ended(client, begin(client, lines, endpoint="/v1/responses").id)
    assert batch.status == "completed" and batch.endpoint == "/v1/responses"
    answers, errors = (results(client, id) for id in (batch.output_file_id, batch.error_file_id))
    assert {*answers} == {"a", "b"} and errors["c"]["body"]["error"]["param"] == "previous_response_id"
    for each in answers.values():
        response = openai.types.responses.Response.model_validate(each["body"])
        assert response.output_text == "Because it is so." and each["request_id"] == response.id
        assert each["body"]["store"] is False
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response.id)
    given = [each["body"]["usage"] for each in answers.values()]
    assert batch.usage is not None and batch.usage.output_tokens == 2 * 4
    assert batch.usage.input_tokens == sum(usage["input_tokens"] for usage in given) > 0
    other = ended(client, begin(client, lines).id)
    assert other.status == "failed"  # another endpoint than that of the batch


def test_waiting_clients_precede_batch_lines(
    client: openai.OpenAI, server: LiveServer, engine: ScriptedEngine
) -> None:
    """The running request finishes; then waiting clients are served before the next line."""
    engine.gate.clear()
    batch = begin(client, [line(f"line {number}", f"line {number}") for number in range(3)])
    assert engine.at_gate.wait(PATIENCE)
    with server.client() as other, ThreadPoolExecutor(2) as pool:
        messages: list[Any] = [[{"role": "user", "content": f"client {number}"}] for number in (1, 2)]
        for each in messages:
            pool.submit(other.chat.completions.create, model=NAME, messages=each)
        wait_until(lambda: server.service.queue_length == 2)
        engine.gate.set()
    assert ended(client, batch.id).status == "completed"
    final = [
        "client" if "client" in engine.decode_with_special(request.prompt) else "line"
        for request in engine.requests
    ]
    assert final == ["line", "client", "client", "line", "line"]


WRONG: list[tuple[list[Any], str, int | None]] = [
    (["nonsense"], "invalid_json", 1),
    ([line("a"), {**line("b"), "url": "/v1/completions"}], "invalid_url", 2),
    ([line("a"), {**line("b"), "url": "/v1/embeddings"}], "invalid_line", 2),
    ([line("a"), line("a")], "duplicate_custom_id", None),
    ([{"id": "a", "prompt": "Why?"}], "invalid_line", 1),
    ([{"custom_id": "a", "method": "POST", "url": CHAT}], "missing_required_parameter", 1),
    ([" "], "empty_file", None),
]


def test_invalid_batch_file(shared: LiveServer) -> None:
    with shared.client() as client:
        for lines, code, number in WRONG:
            batch = ended(client, begin(client, lines).id)
            assert batch.status == "failed" and batch.failed_at is not None and batch.in_progress_at is None
            assert batch.errors is not None and batch.errors.data is not None
            (error,) = batch.errors.data
            assert (error.code, error.line) == (code, number)
            assert error.message and "/" not in error.message[:4]
            assert batch.output_file_id is batch.error_file_id is None


def test_cancel_batch(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    """Cancelling takes effect at once, in the middle of an answer; finished answers stay."""
    engine.answers, engine.gate = ["One.", *["Two."] * 9], PassGate(1)
    batch = begin(client, [line(name) for name in "abc"])
    assert engine.at_gate.wait(PATIENCE)
    later = begin(client, [line(name) for name in "abc"])
    assert client.batches.cancel(later.id).status in ("cancelling", "cancelled")
    assert ended(client, later.id).output_file_id is None
    assert client.batches.retrieve(batch.id).status == "in_progress"
    client.batches.cancel(batch.id)
    batch = ended(client, batch.id)
    assert batch.status == "cancelled" and batch.cancelling_at and batch.cancelled_at
    assert batch.request_counts is not None and batch.request_counts.total == 3
    assert {*results(client, batch.output_file_id)} == {"a"}
    engine.gate.set()
    done = ended(client, begin(client, [line("a")]).id)
    with pytest.raises(openai.BadRequestError, match="it is completed"):
        client.batches.cancel(done.id)


def test_cancel_failed_batch(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends even while its results are collected."""
    with stuck("ftruncate", monkeypatch) as waiting:
        batch = begin(client, ["nonsense"])
        assert waiting.wait(PATIENCE)
        assert client.batches.cancel(batch.id).status == "cancelling"
    assert ended(client, batch.id).status == "cancelled"


def test_batch_continues_after_restart(engine: ScriptedEngine, data: Path) -> None:
    """Finished answers stay, an interrupted one runs again, and pending ones follow."""
    engine.answers = ["One.", Script("Two.", endless=True)]
    lines = [line(name, temperature=1) for name in "abc"]
    with LiveServer(engine, shutdown_timeout=0.0) as server, server.client() as client:
        engine.gate.clear()
        first = begin(client, lines)
        assert engine.at_gate.wait(PATIENCE)
        second = begin(client, lines[:1])
        engine.gate.set()
        wait_until(lambda: len(engine.requests) > 1)
    before = engine.requests
    again = ScriptedEngine(["Three."])
    with LiveServer(again) as server, server.client() as client:
        batch = ended(client, first.id)
        answers = results(client, batch.output_file_id)
        assert ended(client, second.id).request_counts == openai.types.BatchRequestCounts(
            completed=1, failed=0, total=1
        )
    assert {*answers} == {*"abc"} and batch.error_file_id is None
    texts = [answers[name]["body"]["choices"][0]["message"]["content"] for name in "abc"]
    assert texts[0] == "One." and texts[-1] == "Three."
    assert again.requests[0].params.seed == before[texts.index("Three.")].params.seed


def test_leftovers_of_a_kill(engine: ScriptedEngine, data: Path) -> None:
    """Half a line at the end of a file, half a file, and a batch that was about to end."""
    with LiveServer(engine) as server, server.client() as client:
        batch = ended(client, begin(client, [line(name) for name in "abc"]).id)
        whole = client.files.content(batch.output_file_id or "").content
    folder = batches_folder(NAME)
    kept = folder / f"{batch.output_file_id}.jsonl"
    for status in ("in_progress", "finalizing", "cancelling"):
        (folder / f"{batch.output_file_id}.json").unlink(missing_ok=True)
        record = json.loads((folder / f"{batch.id}.json").read_text())
        (folder / f"{batch.id}.json").write_text(
            json.dumps({**record, "status": status, "has_output": False})
        )
        kept.write_bytes(whole[:-5] if status == "in_progress" else whole + b'{"custom_id"')
        (folder / ".file-1.jsonl.2-3.partial").touch()
        with LiveServer(ScriptedEngine()) as server, server.client() as client:
            batch = ended(client, batch.id)
            found = results(client, batch.output_file_id)
        assert {*found} == {*"abc"}
        assert batch.status == ("cancelled" if status == "cancelling" else "completed")
        assert not list(folder.glob("*.partial")) and not list(folder.glob(".*.partial"))


@contextmanager
def program(signal: Signals) -> Iterator[openai.OpenAI]:
    """Run a server in a process of its own, which ends by a signal."""
    command = [sys.executable, "-m", "tests.server.batch_server_program"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE) as client:
                yield client
        finally:
            process.send_signal(signal)


def test_batch_survives_server_kills(data: Path) -> None:
    """At random moments from a fixed seed: every id occurs once, with the answer of an undisturbed batch."""
    lines = [line(f"q{number}", f"w{number} w7", temperature=1) for number in range(24)]
    with program(Signals.SIGKILL) as client:
        batch, again = begin(client, lines), begin(client, lines[:3])
    chance = random.Random(5)
    output = json.loads((batches_folder(NAME) / f"{batch.id}.json").read_text())["output"]
    path = batches_folder(NAME) / f"{output}.jsonl"
    for enough in sorted(chance.sample(range(22), 2)):
        with program(Signals.SIGKILL):
            wait_until(lambda enough=enough: path.exists() and path.read_bytes().count(b"\n") > enough)  # type: ignore[misc]
            time.sleep(chance.random() * 0.03)
    with program(Signals.SIGTERM) as client:
        whole = begin(client, lines)
        final = [ended(client, each.id) for each in (batch, again, whole)]
        found = [results(client, each.output_file_id) for each in final]
    texts = [
        {name: each["body"]["choices"][0]["message"]["content"] for name, each in answers.items()}
        for answers in found
    ]
    assert texts[0] == texts[2] and len(texts[0]) == 24
    assert texts[1] == {name: texts[0][name] for name in ("q0", "q1", "q2")}
    assert [each.request_counts and each.request_counts.completed for each in final] == [24, 3, 24]


def test_damaged_files_are_skipped(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The server logs it; if a folder is unusable, the rest of the server works."""
    folder = batches_folder(NAME)
    folder.mkdir(parents=True)
    for name, text in (("batch_1", "{"), ("batch_2", '{"id": 3}'), ("file-3", "\xff")):
        (folder / f"{name}.json").write_text(text)
    with LiveServer(ScriptedEngine()) as server, server.client() as client:
        assert not client.batches.list().data and not client.files.list().data
    assert all(f"{name}.json is damaged" in caplog.text for name in ("batch_1", "batch_2", "file-3"))
    shutil.rmtree(data)
    data.write_text("no folder")
    with LiveServer(ScriptedEngine()) as server, server.client() as client:
        with pytest.raises(openai.InternalServerError, match="cannot store files"):
            client.files.list()
        assert client.models.list().data
    assert "OFFSPEC_DATA" in caplog.text


def test_second_server_of_a_model(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    client.files.list()
    with LiveServer(ScriptedEngine()) as other, other.client() as asking:
        with pytest.raises(openai.InternalServerError, match="another server of this model"):
            asking.files.list()
        assert asking.models.list()
    with (
        LiveServer(ScriptedEngine(), served_model_names=("alias", "another")) as other,
        other.client() as asking,
    ):
        assert not asking.files.list().data


def test_engine_failure(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    error = StreamError("the disk is gone", file=Path("x"), offset=0)
    engine.answers = [Script("a", error=error, fail_after=0)]
    batch = ended(client, begin(client, [line(name) for name in "abcd"]).id)
    assert batch.status == "failed" and batch.errors is not None and batch.errors.data is not None
    assert "stopped at line 3" in (batch.errors.data[0].message or "")
    assert len(results(client, batch.error_file_id)) == 2


def test_files_in_use_cannot_be_deleted(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.gate.clear()
    batch = begin(client, [line("a")])
    with pytest.raises(openai.BadRequestError, match="cancel the batch first"):
        client.files.delete(batch.input_file_id)
    engine.gate.set()
    ended(client, batch.id)
    assert client.files.delete(batch.input_file_id).deleted


def test_files_and_batches_expire(
    client: openai.OpenAI, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expires = {"anchor": "created_at", "seconds": 3600}
    batch = ended(client, begin(client, [line("a")], output_expires_after=expires).id)
    now = time.time()
    monkeypatch.setattr("offspec.server.batch.stored_files.time.time", lambda: now + 3700)
    assert [file.id for file in client.files.list()] == [batch.input_file_id]
    monkeypatch.setattr("offspec.server.batch.stored_files.time.time", lambda: now + 31 * 86400)
    assert not client.files.list().data and not client.batches.list().data
    assert not [path for path in batches_folder(NAME).iterdir() if path.suffix in (".json", ".jsonl")]


def test_server_stays_responsive_with_a_slow_disk(
    client: openai.OpenAI, server: LiveServer, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these requests waits for a hanging disk; other requests are answered meanwhile."""
    engine.gate.clear()
    running, file, unused = begin(client, [line("a")]), upload(client, [line("a")]), upload(client, ["x"])
    assert engine.at_gate.wait(PATIENCE)
    begins: Any = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    requests: list[tuple[str, Callable[[], Any]]] = [
        ("fsync", lambda: client.batches.create(**begins)),
        ("fsync", lambda: client.batches.cancel(running.id)),
        ("fsync", lambda: upload(client, [line("b")])),
        ("unlink", lambda: client.files.delete(unused)),
    ]
    with ThreadPoolExecutor(1) as pool, server.http() as http:
        for name, request in requests:
            with stuck(name, monkeypatch) as waiting:
                job = pool.submit(request)
                assert waiting.wait(PATIENCE)
                for path in ("/health", "/v1/batches", "/v1/files"):
                    assert http.get(path).status_code == 200
                assert not job.done()
            job.result()
    engine.gate.set()


@contextmanager
def stuck(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Block a function of `os` until the block ends. The event is set once it is called."""
    waiting, gate, call = threading.Event(), threading.Event(), getattr(os, name)

    def wait(*args: Any, **more: Any) -> Any:
        waiting.set()
        assert gate.wait(PATIENCE)
        return call(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, wait)
        yield waiting
        gate.set()


def test_event_loop_does_no_disk_access(
    engine: ScriptedEngine, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers every operation on files and batches, from the start of a server to its end."""
    found = list[str]()

    def watch(name: str) -> None:
        call = getattr(os, name)

        def watched(*args: Any, **more: Any) -> Any:
            at = args[0] if args else ""
            if (isinstance(at, int) or str(data) in str(at)) and asyncio._get_running_loop() is not None:
                found.append(f"{name} {at}")
            return call(*args, **more)

        monkeypatch.setattr(os, name, watched)

    for name in ("open", "stat", "mkdir", "scandir", "replace", "unlink", "fsync", "ftruncate"):
        watch(name)
    lines = [line("a"), line("b", temperature=-1)]
    with LiveServer(engine, shutdown_timeout=0.0) as server, server.client() as client:
        done = ended(client, begin(client, lines).id)
        assert results(client, done.output_file_id) and results(client, done.error_file_id)
        client.files.delete(done.input_file_id)
        engine.gate.clear()
        cancelled = begin(client, lines)
        assert engine.at_gate.wait(PATIENCE)
        client.batches.cancel(cancelled.id)
        ended(client, cancelled.id)
        unfinished = begin(client, lines)
        assert client.files.list().data and client.batches.list().data
    engine.gate.set()
    with LiveServer(ScriptedEngine()) as server, server.client() as client:
        assert ended(client, unfinished.id).status == "completed"
        now = time.time()
        monkeypatch.setattr("offspec.server.batch.stored_files.time.time", lambda: now + 31 * 86400)
        assert not client.files.list().data
    assert not found


BODY = {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h"}
REFUSED: list[tuple[str, Any, int, str]] = [
    ("/v1/batches", BODY, 404, "input_file_id"),
    ("/v1/batches", {**BODY, "endpoint": "/v1/embeddings"}, 400, "endpoint"),
    ("/v1/batches", {**BODY, "completion_window": "1h"}, 400, "completion_window"),
    ("/v1/batches", {**BODY, "metadata": {"a": "b" * 513}}, 400, "metadata"),
    ("/v1/batches", {**BODY, "priority": 1}, 404, "input_file_id"),
    ("/v1/batches/batch_x/cancel", {}, 404, ""),
    ("/v1/batches/..%2f..%2fetc/cancel", {}, 404, ""),
]


def test_invalid_batch_requests(shared: LiveServer) -> None:
    with shared.http() as http:
        for path, body, status, field in REFUSED:
            answer = http.post(path, json=body)
            assert answer.status_code == status and (answer.json()["error"]["param"] or "") == field, body


FORMS: list[tuple[dict[str, Any], Any, int, str]] = [
    ({}, ("a", b"x"), 400, "purpose"),
    ({"purpose": "vision"}, ("a", b"x"), 400, "purpose"),
    ({"purpose": "batch"}, ("a", b""), 400, "file"),
    ({"purpose": "batch", "expires_after[anchor]": "created_at"}, ("a", b"x"), 400, "expires_after"),
    ({"purpose": "batch", "more": "1"}, ("a", b"x"), 400, "more"),
    ({"purpose": "batch", "more": "1" * 2000}, ("a", b"x"), 400, ""),
    ({"purpose": "batch"}, ("a", b"x" * 50_000), 413, ""),
]


def test_invalid_forms(shared: LiveServer) -> None:
    with shared.http() as http:
        kept = http.get("/v1/files").json()
        for fields, file, status, field in FORMS:
            answer = http.post("/v1/files", data=fields, files={"file": file})
            assert answer.status_code == status and (answer.json()["error"]["param"] or "") == field, fields
            assert answer.headers["connection"] == "close"
            assert http.get("/v1/files").json() == kept


def test_cross_origin_forms(shared: LiveServer) -> None:
    """A page can send a form without a preflight, but the browser adds its origin."""
    given: Any = {"data": {"purpose": "batch"}, "files": {"file": ("a", b"x")}}
    with shared.http() as http:
        for origin in ("https://evil.example", "null", "http://127.0.0.1:1"):
            answer = http.post("/v1/files", headers={"origin": origin}, **given)
            assert answer.status_code == 403
        assert (file := http.post("/v1/files", headers={"origin": shared.url}, **given)).status_code == 200
        assert http.delete(f"/v1/files/{file.json()['id']}").status_code == 200
        assert http.post("/v1/files", json={}).status_code == 400


def test_upload_limits(shared: LiveServer, server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit for each, chunked or not, and one for all together."""
    with shared.http() as http:
        body = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"x" * 50_000
        headers = {"content-type": "multipart/form-data; boundary=b"}
        for content in (body, iter([body[:30_000], body[30_000:]])):
            assert http.post("/v1/files", content=content, headers=headers).status_code == 413
        assert http.post("/v1/files", content=b"nonsense", headers=headers).status_code == 400
    with server.client() as client:
        upload(client, [line("a")])
        most = server.server.batches.files.most_bytes
        monkeypatch.setattr(server.server.batches.files, "most_bytes", 1000)
        with pytest.raises(openai.APIStatusError, match="delete some") as refused:
            upload(client, [line("a", "x" * 1000)])
        assert refused.value.status_code == 413
        monkeypatch.setattr(server.server.batches.files, "most_bytes", most)
        monkeypatch.setattr(server.server.batches.runner, "most_lines", 2)
        assert ended(client, begin(client, [line("a"), line("b")]).id).errors is None
        batch = ended(client, begin(client, [line(name) for name in "abc"]).id)
        assert batch.errors is not None and batch.errors.data is not None
        assert batch.errors.data[0].code == "too_many_lines"
