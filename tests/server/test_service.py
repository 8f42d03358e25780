"""The server around an engine: loading, the queue, disconnects, slow readers, errors, and the stop."""

import gc
import json
import logging
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import openai
import pytest

from offspec.core.config import EngineConfig
from offspec.core.errors import CapacityError, StreamError
from offspec.core.events import PassStats
from offspec.server import delta_stream as answers
from offspec.server import reply
from offspec.server.metrics import Metrics
from tests.support.fake_engine import PassGate, Script, ScriptedEngine, ScriptedLoad, load_progress
from tests.support.live_server import NAME, LiveServer
from tests.support.waiting import PATIENCE, wait_until

ASKED: Any = {"model": NAME, "messages": [{"role": "user", "content": "Why is the sky blue?"}]}
CHAT = "/v1/chat/completions"
LONG = " ".join(f"word{i}" for i in range(400))


@contextmanager
def paused_server(engine: ScriptedEngine, **settings: Any) -> Iterator[LiveServer]:
    """A server whose engine pauses in the middle of every pass until its gate is opened."""
    engine.gate.clear()
    with LiveServer(engine, **settings) as server:
        try:
            yield server
        finally:
            engine.gate.set()


def test_health_and_requests_while_loading() -> None:
    load = ScriptedLoad(ScriptedEngine(), progress=load_progress(2))
    load.gate.clear()
    config = EngineConfig(NAME)
    serving = LiveServer(lambda notify: load(config, None, notify), ready=False)
    with serving as server, server.http() as http:
        wait_until(lambda: server.service.progress.done == 2 * 10**9)
        health = http.get("/health")
        assert health.status_code == 503 and health.headers["retry-after"] == "5"
        report = health.json()
        assert (report["status"], report["stage"], report["unit"]) == (
            "loading",
            "reading the model",
            "bytes",
        )
        assert report["done"] == report["total"] == 2 * 10**9
        refused = http.post(CHAT, json=ASKED)
        assert refused.status_code == 503
        assert "loading: reading the model" in refused.json()["error"]["message"]
        load.gate.set()
        wait_until(lambda: http.get("/health").status_code == 200)
        assert http.get("/health").json() == {"status": "ready", "model": NAME, "waiting": 0}
        assert http.post(CHAT, json=ASKED).status_code == 200


def test_metrics() -> None:
    with LiveServer(ScriptedEngine(["one two three four five six"])) as server, server.http() as http:
        http.post(CHAT, json=ASKED)
        http.post(CHAT, json={})
        http.get("/nothing/here")
        server.wait_until_idle()
        lines = http.get("/metrics").text.splitlines()
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}
    assert values[f'offspec_requests_total{{route="{CHAT}",status="200"}}'] == 1
    assert values[f'offspec_requests_total{{route="{CHAT}",status="400"}}'] == 1
    assert values['offspec_requests_total{route="other",status="404"}'] == 1
    assert values["offspec_answer_tokens_total"] == 6
    assert values["offspec_passes_total"] == 2
    assert values["offspec_tokens_per_pass_sum"] / values["offspec_tokens_per_pass_count"] == 3
    assert values["offspec_prompt_tokens_total"] > 0
    assert values["offspec_cached_prompt_tokens_total"] == 0
    assert values["offspec_queue_length"] == 0
    assert 0 < values["offspec_link_utilization"] <= 1
    assert not [line for line in lines if "_created" in line]


def test_on_demand_experts_are_counted() -> None:
    metrics = Metrics()
    for read in (4, 1):
        metrics.record_pass(PassStats(1, 1, 0, 0, 1, 0.0, 0.5, 10**6, experts_asked=9, experts_read=read))
    page = metrics.page().decode()
    assert "offspec_experts_asked_total 18.0" in page and "offspec_experts_read_total 5.0" in page


def test_requests_are_answered_in_order() -> None:
    engine = ScriptedEngine()
    with paused_server(engine) as server, ThreadPoolExecutor(5) as pool, server.http() as http:
        jobs = []
        for at in range(5):
            body = {**ASKED, "messages": [{"role": "user", "content": f"question {at}"}]}
            jobs.append(pool.submit(http.post, CHAT, json=body))
            wait_until(partial(_are_there, server, at + 1))
        assert http.get("/health").json()["waiting"] == 4
        engine.gate.set()
        assert [job.result().status_code for job in jobs] == [200] * 5
    spoken = [engine.wording.decode_with_special(fields.prompt) for fields in engine.requests]
    assert spoken == [f"<|user|>question {at}\n<|assistant|>" for at in range(5)]


def _are_there(server: LiveServer, count: int) -> bool:
    return server.service.in_flight == count and server.service.queue_length == count - 1


def test_full_queue() -> None:
    engine = ScriptedEngine()
    with paused_server(engine, max_queue=1) as server, ThreadPoolExecutor(2) as pool, server.http() as http:
        jobs = [pool.submit(http.post, CHAT, json=ASKED)]
        assert engine.at_gate.wait(PATIENCE)
        jobs.append(pool.submit(http.post, CHAT, json=ASKED))
        wait_until(lambda: server.service.queue_length == 1)
        with server.client() as client, pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(**ASKED)
        assert refused.value.code == "queue_full" and refused.value.response.headers["retry-after"] == "10"
        engine.gate.set()
        assert [job.result().status_code for job in jobs] == [200, 200]
        assert http.post(CHAT, json=ASKED).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_cancels_generation(stream: bool) -> None:
    """In the middle of a pass after the prompt, and while it waits for its turn."""
    engine = ScriptedEngine([LONG])
    engine.gate = PassGate(1)
    with paused_server(engine) as server:
        leaving = [_send(server, {**ASKED, "stream": stream})]
        assert engine.at_gate.wait(PATIENCE)
        leaving.append(_send(server, {**ASKED, "stream": stream}))
        wait_until(lambda: server.service.queue_length == 1)
        leaving[1].close()
        wait_until(lambda: server.service.queue_length == 0)
        leaving[0].close()
        wait_until(lambda: not server.service.in_flight)  # though the gate is closed
        assert len(engine.requests) == 1 and engine.steps[-1] == "stream closed"
        engine.gate.set()
        with server.http() as http:
            assert http.post(CHAT, json=ASKED).status_code == 200


def test_abandoned_answer_frees_its_place_in_the_queue() -> None:
    """Its prompt is computed for a retry; another request ends it."""
    engine = ScriptedEngine()
    with paused_server(engine, max_queue=0) as server, ThreadPoolExecutor(1) as pool, server.http() as http:
        leaving = _send(server, ASKED)
        assert engine.at_gate.wait(PATIENCE)
        leaving.close()
        wait_until(lambda: not server.server.server_state.tasks)
        assert server.service.in_flight
        other = pool.submit(http.post, CHAT, json={**ASKED, "messages": [{"role": "user", "content": "No"}]})
        wait_until(lambda: len(engine.requests) == 2)
        engine.gate.set()
        assert other.result().status_code == 200


def test_slow_reader_does_not_delay_others() -> None:
    engine = ScriptedEngine([Script("x" * 3 * 10**5 + " end", pass_tokens=1)] * 3 + ["short"])
    with LiveServer(engine) as server, server.http() as http:
        slow = [_send(server, {**ASKED, "stream": True, "n": 1}) for _ in range(3)]
        wait_until(lambda: len(engine.requests) == 3)
        assert http.post(CHAT, json=ASKED).json()["choices"][0]["message"]["content"] == "short"
        for each in slow:  # and their whole answers are available
            assert b"end" in _read(each)
            each.close()


def test_unread_answer_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_MOST_UNREAD", 20)
    script = Script(" ".join("y" * 10**4 for _ in range(200)), pass_tokens=1)
    engine = ScriptedEngine([script, "short"])
    with LiveServer(engine) as server, server.http() as http:
        slow = _send(server, {**ASKED, "stream": True})
        wait_until(lambda: engine.requests)
        assert http.post(CHAT, json=ASKED).json()["choices"][0]["message"]["content"] == "short"
        read = _read(slow)
        slow.close()
    assert b"the client read it too slowly" in read and len(read) < 10**6


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (True, StreamError("read failed", file="/secret/model.safetensors", offset=3)),
        (False, CapacityError("memory ran out", needed=0, given=0)),
        (False, RuntimeError("a bug in /secret/place")),
    ],
)
def test_engine_failure(stream: bool, error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine([Script("one two three four five six", fail_after=1, error=error), "fine"])
    with LiveServer(engine) as server, server.http() as http:
        answer = http.post(CHAT, json={**ASKED, "stream": stream})
        *parts, last = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        said = json.loads(last)
        assert said["error"]["type"] == "server_error"
        assert answer.status_code == (200 if stream else 500)
        assert "secret" not in answer.text and "Traceback" not in answer.text
        assert not stream or any("one" in part for part in parts)
        again = http.post(CHAT, json=ASKED)
        assert again.json()["choices"][0]["message"]["content"] == "fine"
        assert f'offspec_errors_total{{kind="{type(error).__name__}"}} 1.0' in http.get("/metrics").text
    assert str(error) in caplog.text


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_internal_error_has_the_format_of_its_api(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(ask: Any) -> Any:
        raise TypeError("a bug in /secret/place")

    with LiveServer(ScriptedEngine()) as server, server.http() as http:
        monkeypatch.setattr(server.service, "answer", broken)
        answer = http.post(path, json={**ASKED, "max_tokens": 3})
    assert answer.status_code == 500 and "internal error" in answer.json()["error"]["message"]
    assert ("type" in answer.json()) == (path == "/v1/messages")
    assert "secret" not in answer.text and "a bug in /secret/place" in caplog.text


def test_line_ends_in_text_do_not_split_events() -> None:
    """For any character that a client may treat as a line end."""
    text = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\r\nh"
    with LiveServer(ScriptedEngine([text])) as server, server.http() as http:
        lines = http.post(CHAT, json={**ASKED, "stream": True}).content.decode().splitlines()
        assert all(line.startswith("data: ") for line in lines if line)
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    said = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert said == text


def test_stop_lets_the_running_answer_finish() -> None:
    engine = ScriptedEngine()
    with (
        paused_server(engine, shutdown_timeout=PATIENCE) as server,
        ThreadPoolExecutor(2) as pool,
        server.http() as http,
    ):
        running = pool.submit(http.post, CHAT, json=ASKED)
        assert engine.at_gate.wait(PATIENCE)
        waiting = pool.submit(http.post, CHAT, json={**ASKED, "stream": True})
        wait_until(lambda: server.service.queue_length == 1)
        server.server.should_exit = True
        assert "the server is stopping" in waiting.result().text
        engine.gate.set()
        assert running.result().json()["choices"][0]["message"]["content"] == "The sky is blue."
        server.stop()
    assert engine.closed


def test_stop_cancels_answers_that_take_too_long() -> None:
    engine = ScriptedEngine([LONG])
    with (
        paused_server(engine, shutdown_timeout=0.05) as server,
        ThreadPoolExecutor(1) as pool,
        server.http() as http,
    ):
        running = pool.submit(http.post, CHAT, json={**ASKED, "stream": True})
        assert engine.at_gate.wait(PATIENCE)
        server.stop()
        *_, last = [line for line in running.result().text.splitlines() if line]
        assert json.loads(last[6:])["error"]["message"] == "the answer was aborted: the server is stopping"
    assert engine.closed and engine.steps[-1] == "engine closed"


def test_stopping_server_refuses_requests(caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine()
    caplog.set_level(logging.INFO, "offspec.server")
    with LiveServer(engine) as server, server.http() as http:
        server.service.state = "stopping"
        refused = http.post(CHAT, json=ASKED)
        assert refused.status_code == 503 and http.get("/health").json()["status"] == "stopping"
        server.service.state = "ready"
    lines = [record.getMessage() for record in caplog.records if record.name == "offspec.server.access"]
    assert len(lines) == 2
    assert f"127.0.0.1 POST {CHAT} 503" in lines[0] and refused.headers["x-request-id"] in lines[0]


def test_engine_fails_to_load() -> None:
    def load(notify: Any) -> Any:
        raise CapacityError("it does not fit", needed=2, given=1)

    server = LiveServer(load)
    with server:
        server.wait()
    assert "it does not fit" in str(server.service.error)


def test_disconnects_leave_no_resources(caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine([LONG], delay=0.0001)
    with LiveServer(engine, max_queue=1000) as server, server.http() as http:
        http.post(CHAT, json={**ASKED, "max_tokens": 4})
        server.wait_until_idle()
        before = _left_behind(server)
        for at in range(60):
            client = _send(server, {**ASKED, "stream": at % 2 == 0})
            if at % 3 == 0:
                client.recv(1)
            client.close()
        with _send(server, {**ASKED, "max_tokens": 4}) as last:
            assert b" 200 OK" in _read(last)  # so that the server has accepted all connections before it
        wait_until(lambda: all(now <= then for now, then in zip(_left_behind(server), before, strict=True)))
        assert http.get("/health").json()["waiting"] == 0
        assert http.post(CHAT, json={**ASKED, "max_tokens": 4}).status_code == 200
    assert "Traceback" not in caplog.text


def _left_behind(server: LiveServer) -> tuple[int, ...]:
    """Resources that requests may leave behind: tasks, connections, answers, threads, open files."""
    gc.collect()  # first: garbage may hold files
    found = sum(isinstance(each, answers.DeltaStream) for each in gc.get_objects())
    state, files = server.server.server_state, len(os.listdir("/proc/self/fd"))
    counts = server.service.in_flight, len(state.tasks), len(state.connections)
    return *counts, found, threading.active_count(), files


def _send(server: LiveServer, body: Any) -> socket.socket:
    """Send a request on a connection of its own, without reading the response."""
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)
    connection.sendall(f"{head}connection: close\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def _read(connection: socket.socket) -> bytes:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
    return b"".join(iter(lambda: connection.recv(2**16), b""))


@pytest.mark.parametrize(
    ("path", "sign", "last"),
    [(CHAT, ": waiting", "[DONE]"), ("/v1/messages", 'data: {"type":"ping"}', '{"type":"message_stop"}')],
)
def test_waiting_stream_sends_comments(
    path: str, sign: str, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reply, "_KEEP_ALIVE_S", 0.02)
    engine = ScriptedEngine()
    fields = {**ASKED, "stream": True, "max_tokens": 9}
    with (
        paused_server(engine) as server,
        server.http() as http,
        http.stream("POST", path, json=fields) as answer,
    ):
        lines = answer.iter_lines()
        assert [line for line, _ in zip(lines, range(20), strict=False)].count(sign) > 2
        engine.gate.set()
        assert [line for line in lines if line][-1] == f"data: {last}"


def test_httpx_receives_events_immediately() -> None:
    """Not only at the end: the first event arrives while the engine pauses in its second pass."""
    engine = ScriptedEngine(["one two three four five six seven eight"])
    engine.gate = PassGate(1)
    with (
        LiveServer(engine) as server,
        server.http() as http,
        http.stream("POST", CHAT, json={**ASKED, "stream": True}) as answer,
    ):
        lines = answer.iter_lines()
        assert next(line for line in lines if "one two three four" in line)
        engine.gate.set()
        assert any("five six seven eight" in line for line in lines)
