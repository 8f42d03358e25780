"""Web pages of other origins: access to the server, and readable responses."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offspec.core.errors import RequestError
from offspec.server.cors import checked_origin
from tests.support.fake_engine import ScriptedEngine
from tests.support.live_server import NAME, LiveServer

ASKED: Any = {"model": NAME, "messages": [{"role": "user", "content": "Why is the sky blue?"}]}
CHAT = "/v1/chat/completions"
KEY = "key-1"
OURS, THEIRS = "https://app.example", "https://evil.example"
FORM: Any = {"data": {"purpose": "batch"}, "files": {"file": ("a", b"x")}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFSPEC_DATA", str(tmp_path_factory.mktemp("data")))
        with LiveServer(ScriptedEngine(), api_key=KEY, origins=(OURS, "http://localhost:3000")) as server:
            yield server


def preflight(server: LiveServer, origin: str, headers: str, method: str = "POST") -> Any:
    """Response to the request that a browser sends first, without key or body."""
    sent = {"access-control-request-method": method, "access-control-request-headers": headers}
    with server.http() as http:
        del http.headers["authorization"]
        return http.options(CHAT, headers={"origin": origin, **sent})


@pytest.mark.parametrize(
    "headers",
    [
        "authorization, content-type",
        "anthropic-version, anthropic-dangerous-direct-browser-access, content-type, x-api-key",
        "authorization, content-type, x-stainless-arch, x-stainless-lang",
    ],
)
def test_preflight(server: LiveServer, headers: str) -> None:
    answer = preflight(server, OURS, headers)
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == OURS
    allowed = answer.headers["access-control-allow-headers"].lower().split(",")
    assert {name.strip() for name in headers.split(",")} <= {name.strip() for name in allowed}
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "access-control-allow-credentials" not in answer.headers
    assert preflight(server, OURS, headers, "DELETE").status_code == 200


def test_preflight_of_unlisted_origins(server: LiveServer) -> None:
    for origin in (THEIRS, "null", "https://app.example.evil.example", "http://app.example"):
        answer = preflight(server, origin, "content-type")
        assert answer.status_code == 400 and "access-control-allow-origin" not in answer.headers


def test_allowed_origins_can_read_answers_and_errors(server: LiveServer) -> None:
    """Including those of the guard; pages of other origins cannot read any."""
    with server.http() as http:
        for origin in (OURS, THEIRS):
            given = {"origin": origin}
            wrong = {**given, "authorization": "Bearer wrong"}
            answers = {
                200: http.post(CHAT, json=ASKED, headers=given),
                400: http.post(CHAT, content=b"{}", headers=given),
                401: http.post(CHAT, json=ASKED, headers=wrong),
                404: http.get("/v1/nothing", headers=given),
            }
            for status, answer in answers.items():
                assert answer.status_code == status and "Origin" in answer.headers["vary"]
                assert answer.headers.get("access-control-allow-origin") == (OURS if origin == OURS else None)
            assert "x-request-id" in answers[401].headers["access-control-expose-headers"]
        assert "access-control-allow-origin" not in http.post(CHAT, json=ASKED).headers


def test_allowed_origins_can_read_streams(server: LiveServer) -> None:
    with server.http() as http:
        sent = {**ASKED, "stream": True}
        answer = http.post(CHAT, json=sent, headers={"origin": "http://localhost:3000"})
        assert answer.text.endswith("data: [DONE]\n\n")
        assert answer.headers["access-control-allow-origin"] == "http://localhost:3000"


def test_allowed_origins_can_upload_files(server: LiveServer) -> None:
    with server.http() as http:
        for origin, status in ((OURS, 200), (server.url, 200), (THEIRS, 403), ("null", 403)):
            assert http.post("/v1/files", headers={"origin": origin}, **FORM).status_code == status


def test_any_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFSPEC_DATA", str(tmp_path))
    with LiveServer(ScriptedEngine(), origins=("*",)) as server, server.http() as http:
        given = {"origin": THEIRS, "access-control-request-method": "POST"}
        answers = http.options(CHAT, headers=given), http.post(CHAT, json=ASKED, headers={"origin": THEIRS})
        assert [answer.headers["access-control-allow-origin"] for answer in answers] == ["*", "*"]
        assert http.post("/v1/files", headers={"origin": THEIRS}, **FORM).status_code == 200
        refused = http.post(CHAT, json=ASKED, headers={"origin": THEIRS, "host": "evil.example"})
        assert refused.status_code == 403  # the host name is still checked


@pytest.mark.parametrize(
    ("given", "origin"),
    [
        ("*", "*"),
        ("HTTP://LocalHost:3000", "http://localhost:3000"),
        ("https://app.example:443", "https://app.example"),
        ("http://app.example:80", "http://app.example"),
        ("http://app.example:443", "http://app.example:443"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("chrome-extension://abcdef", "chrome-extension://abcdef"),
    ],
)
def test_valid_origins(given: str, origin: str) -> None:
    assert checked_origin(given) == origin


WRONG = ("", "localhost:3000", "https://a.example/", "https://*.example", "null", "http://a b", "http://u@a")


@pytest.mark.parametrize("given", WRONG)
def test_invalid_origins(given: str) -> None:
    with pytest.raises(RequestError, match="`cors_origin` must be scheme"):
        checked_origin(given)
