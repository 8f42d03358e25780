"""Access and limits: API keys, sizes, slow clients, connections, and origins of requests."""

import gzip
import hmac
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import openai
import pytest

from offspec.server import admission
from offspec.server.connections import LimitedConnection
from tests.support.fake_engine import Script, ScriptedEngine
from tests.support.live_server import NAME, LiveServer
from tests.support.waiting import PATIENCE, wait_until

ASKED: Any = {"model": NAME, "messages": [{"role": "user", "content": "Why is the sky blue?"}]}
CHAT = "/v1/chat/completions"
KEY = "key-1"
JSON = "content-type: application/json\r\n"


SHORT = 0.1  # seconds: a limit that a test waits to run out


@pytest.fixture(scope="module")
def locked() -> Iterator[LiveServer]:
    limits = {"body_bytes": 20_000, "body_seconds": PATIENCE, "bodies_bytes": 30_000}
    with LiveServer(ScriptedEngine(), api_key=KEY, **limits) as server:
        yield server


@pytest.fixture(scope="module")
def unlocked() -> Iterator[LiveServer]:
    with LiveServer(ScriptedEngine()) as server:
        yield server


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/models", "/metrics", "/nothing"])
def test_requests_without_the_key_are_refused(locked: LiveServer, path: str) -> None:
    wrong = ("Bearer wrong", "Bearer", f"Basic {KEY}")
    given = [{}, *({"authorization": each} for each in wrong), {"x-api-key": "k"}, {"x-api-key": ""}]
    with locked.http() as http:
        del http.headers["authorization"]
        for headers in given:
            answer = http.request("POST" if path.endswith("completions") else "GET", path, headers=headers)
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "invalid_api_key"


def test_requests_with_the_key_are_served(locked: LiveServer) -> None:
    with locked.http() as http:
        for headers in ({"authorization": f"bearer  {KEY}"}, {"x-api-key": KEY}):
            http.headers["authorization"] = ""
            assert http.get("/v1/models", headers=headers).status_code == 200
        assert http.get("/health", headers={"authorization": "no"}).status_code == 200


def test_keys_are_compared_in_constant_time(locked: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests are compared, whatever the length of the key, by the one function that takes constant time."""
    compared = list[tuple[bytes, bytes]]()

    def compare(given: bytes, known: bytes) -> bool:
        compared.append((given, known))
        return hmac.compare_digest(given, known)

    monkeypatch.setattr(admission, "hmac", type("hmac", (), {"compare_digest": staticmethod(compare)}))
    for key in ("k", "k" * 1000, ""):
        with locked.client(api_key=key or "-") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
    assert len(compared) == 3 and {len(each) for pair in compared for each in pair} == {32}


def test_body_too_large(locked: LiveServer) -> None:
    body = b'{"model": "' + b"x" * 30_000 + b'"}'
    chunks: Any = iter([body[:15_000], body[15_000:]])
    with locked.http() as http:
        for content in (body, chunks):
            answer = http.post(CHAT, content=content, headers={"content-type": "application/json"})
            assert answer.status_code == 413 and "20000 bytes" in answer.json()["error"]["message"]
        assert http.post(CHAT, json=ASKED).status_code == 200


def test_bodies_too_large_in_total(locked: LiveServer) -> None:
    """Each would be allowed alone; the other, whose end never comes, makes them exceed the limit."""
    body = b'{"model": "' + b"x" * 17_000 + b'"}'
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nx-api-key: {KEY}\r\n{JSON}content-length: 20000\r\n\r\n"
    headers = {"content-type": "application/json"}
    with locked.http() as http:

        def status() -> int:
            return http.post(CHAT, content=body, headers=headers).status_code

        with _connect(locked) as connection:
            connection.sendall(head.encode() + body)
            wait_until(lambda: status() == 429)
        wait_until(lambda: status() == 400)
        assert http.post(CHAT, json=ASKED).status_code == 200


def _connect(server: LiveServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)


def test_body_timeout() -> None:
    with LiveServer(ScriptedEngine(), body_seconds=SHORT) as server, _connect(server) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\n{JSON}content-length: 100\r\n\r\n{{"
        connection.sendall(head.encode())
        answer = connection.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 408 ") and b"did not arrive in time" in answer


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nx-slow: "])
def test_header_timeout(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitedConnection, "header_seconds", SHORT)
    with LiveServer(ScriptedEngine()) as server, _connect(server) as connection:
        with suppress(OSError):  # it was closed already
            connection.sendall(sent)
        with connection.makefile("rb") as answer:
            assert _end(answer) == b""


def test_header_timeout_of_second_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with LiveServer(ScriptedEngine()) as server, _connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        answer, read = connection.makefile("rb"), b""
        while not read.endswith(b"}"):
            more = answer.read1(2**16)
            assert more, f"closed before the first was answered: {read!r}"
            read += more
        assert read.startswith(b"HTTP/1.1 200 ")
        monkeypatch.setattr(LimitedConnection, "header_seconds", SHORT)
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        assert _end(answer) == b""


def _end(answer: Any) -> bytes:
    try:
        read: bytes = answer.read()
        return read
    except ConnectionResetError:
        return b""


def test_endless_headers(locked: LiveServer) -> None:
    with _connect(locked) as connection:
        try:
            connection.sendall(b"GET /health HTTP/1.1\r\n" + b"x-a: b\r\n" * 20_000)
        except OSError:
            return
        assert _end(connection.makefile("rb"))[:12] in (b"HTTP/1.1 400", b"")


def test_unread_response_closes_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitedConnection, "write_seconds", SHORT)
    engine = ScriptedEngine([Script("x" * 10**6), "fine"])
    with LiveServer(engine) as server, server.http() as http:
        with _connect(server) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)
            body = b'{"model": "tiny", "stream": true, "messages": [{"role": "user", "content": "hi"}]}'
            head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\n{JSON}content-length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            wait_until(lambda: engine.requests and not server.server.server_state.connections)
        assert http.post(CHAT, json=ASKED).status_code == 200


@pytest.mark.parametrize(
    ("path", "kind"), [(CHAT, "service_unavailable_error"), ("/v1/messages", "overloaded_error")]
)
def test_too_many_connections(path: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest is refused in the format of its API and closed; earlier ones are served."""
    monkeypatch.setattr(LimitedConnection, "most", 2)
    with LiveServer(ScriptedEngine()) as server, server.http() as first:
        assert first.get("/health").status_code == 200
        with server.http() as second, server.http() as third:
            assert second.get("/health").status_code == 200
            refused = third.post(path, json=ASKED)
            assert refused.status_code == 503 and refused.json()["error"]["type"] == kind
            assert "too many connections" in refused.json()["error"]["message"]
            assert (refused.headers["retry-after"], refused.headers["connection"]) == ("5", "close")
            assert first.post(CHAT, json=ASKED).status_code == 200
        wait_until(lambda: len(server.server.server_state.connections) == 1)
        with server.http() as third:
            assert third.post(CHAT, json=ASKED).status_code == 200


def test_simple_cross_origin_requests_are_refused(unlocked: LiveServer) -> None:
    """Simple cross-origin requests, which need no preflight, would let any page use the model."""
    kinds = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
    with unlocked.http() as http:
        for headers in ({}, *({"content-type": kind} for kind in kinds)):
            answer = http.post(CHAT, content=b"{}", headers=headers)
            assert answer.status_code == 400 and "content-type" in answer.json()["error"]["message"]
        preflight = http.options(CHAT, headers={"origin": "http://evil.example"})
        assert preflight.status_code == 405 and "access-control-allow-origin" not in preflight.headers
        packed = {"content-type": "application/json", "content-encoding": "gzip"}
        answer = http.post(CHAT, content=gzip.compress(b"{}"), headers=packed)
        assert answer.status_code == 400 and "content-encoding" in answer.json()["error"]["message"]


def test_host_names_of_this_machine(unlocked: LiveServer) -> None:
    ours = "localhost:8000", "my.localhost", "127.0.0.1", "[::1]:80", "192.168.1.2:8000"
    inside = "host.docker.internal:8000", "host.containers.internal"  # containers on this machine
    theirs = "evil.example", "127.0.0.1.evil.example:8000", "evil.docker.internal", ""
    with unlocked.http() as http:
        for host in (*ours, *inside, *theirs):
            status = http.get("/v1/models", headers={"host": host}).status_code
            assert status == (403 if host in theirs else 200), host


def test_events_are_sent_without_delay() -> None:
    with LiveServer(ScriptedEngine()) as server, server.http() as http:
        http.get("/health")
        (connection,) = server.server.server_state.connections
        ours = connection.transport.get_extra_info("socket")
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_request_ids(unlocked: LiveServer) -> None:
    with unlocked.http() as http:
        first, second = (http.get("/health").headers for _ in range(2))
        assert first["x-request-id"] == first["request-id"] != second["x-request-id"]
        assert http.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
        forged = http.get("/health", headers={"x-request-id": "a b"}).headers["x-request-id"]
        assert forged.startswith("req_")


def test_paths_and_methods(unlocked: LiveServer) -> None:
    with unlocked.http() as http:
        missing, wrong = http.get("/v1/nothing"), http.get(CHAT)
        assert (missing.status_code, wrong.status_code, wrong.headers["allow"]) == (404, 405, "POST")
        assert all("error" in answer.json() for answer in (missing, wrong))
        assert http.get("/v1/models/other").json()["error"]["code"] == "model_not_found"
        assert http.get(f"/v1/models/{NAME}").json()["id"] == NAME
        assert [each["id"] for each in http.get("/v1/models").json()["data"]] == [NAME]
