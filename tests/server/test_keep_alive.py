"""Long responses without a stream: spaces before the JSON keep connections alive, and clients skip them."""

import json
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from starlette.types import Send

from offspec.core.errors import StreamError
from offspec.server import openai_common, reply
from tests.server.bodies import CHAT, LEAST, MESSAGES, RESPONSES, TEXT
from tests.support.fake_engine import Script, ScriptedEngine
from tests.support.live_server import NAME, LiveServer
from tests.support.waiting import wait_until

ASKED: Any = [{"role": "user", "content": "Why is the sky blue?"}]
TEXT_OF_ANSWER = "one two three four five six"


def _chat(server: LiveServer) -> str | None:
    with server.client() as client:
        return client.chat.completions.create(model=NAME, messages=ASKED).choices[0].message.content


def _text(server: LiveServer) -> str:
    with server.client() as client:
        return client.completions.create(model=NAME, prompt="Why?").choices[0].text


def _responses(server: LiveServer) -> str:
    with server.client() as client:
        return client.responses.create(model=NAME, input="Why?").output_text


def _messages(server: LiveServer) -> str:
    with server.anthropic() as client:
        (block,) = client.messages.create(model=NAME, messages=ASKED, max_tokens=99).content
        assert block.type == "text"
        return block.text


@pytest.fixture
def spaces(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Spaces sent so far; the interval is short."""
    found, send = list[bytes](), reply._send

    async def noted(to: Send, data: bytes) -> None:
        found.append(data)
        await send(to, data)

    monkeypatch.setattr(reply, "_KEEP_ALIVE_S", 0.01)
    monkeypatch.setattr(reply, "_send", noted)
    return found


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    """An engine that pauses each pass in the middle."""
    engine = ScriptedEngine([TEXT_OF_ANSWER])
    engine.gate.clear()
    yield engine
    engine.gate.set()


@pytest.mark.parametrize("ask", [_chat, _text, _responses, _messages])
def test_official_clients_skip_leading_spaces(
    ask: Callable[[LiveServer], str | None], engine: ScriptedEngine, spaces: list[bytes]
) -> None:
    with LiveServer(engine) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, server)
        wait_until(lambda: len(spaces) > 2)
        engine.gate.set()
        assert answer.result() == TEXT_OF_ANSWER
    assert {*spaces} == {b" "}


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES, MESSAGES])
def test_error_after_the_first_space_is_the_body(
    path: str, engine: ScriptedEngine, spaces: list[bytes]
) -> None:
    error = StreamError("read failed", file="/secret/model.safetensors", offset=3)
    engine.answers = [Script(TEXT_OF_ANSWER, fail_after=1, error=error)]
    with LiveServer(engine) as server, server.http() as http, ThreadPoolExecutor(1) as pool:
        future = pool.submit(http.post, path, json={"model": NAME, **LEAST[path]})
        wait_until(lambda: spaces)
        engine.gate.set()
        answer = future.result()
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
    assert answer.content.startswith(b" ") and "secret" not in answer.text
    body = json.loads(answer.text)
    assert "was aborted" in body["error"]["message"]
    assert (body.get("type") == "error") == (path == MESSAGES)
    assert (body.get("status") == "failed") == (path == RESPONSES)


def test_unexpected_error_after_the_first_space(
    engine: ScriptedEngine,
    spaces: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*usages: Any) -> Any:
        raise TypeError("a bug in /secret/place")

    monkeypatch.setattr(openai_common, "_chunked_usage", broken)
    with LiveServer(engine) as server, server.http() as http, ThreadPoolExecutor(1) as pool:
        future = pool.submit(http.post, CHAT, json={"model": NAME, **LEAST[CHAT]})
        wait_until(lambda: spaces)
        engine.gate.set()
        assert "internal error" in future.result().json()["error"]["message"]
    assert "a bug in /secret/place" in caplog.text


def test_disconnect_between_spaces(
    engine: ScriptedEngine, spaces: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "offspec.server")
    with LiveServer(engine) as server, server.http() as http:
        with http.stream("POST", CHAT, json={"model": NAME, **LEAST[CHAT]}) as answer:
            assert answer.status_code == 200 and "content-length" not in answer.headers
            assert next(answer.iter_bytes()).strip() == b""
        wait_until(lambda: "POST" in caplog.text)
        engine.gate.set()
        server.wait_until_idle()
    assert "Traceback" not in caplog.text
