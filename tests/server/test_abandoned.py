"""Clients that disconnect while a real engine computes their prompt: a retry finds it in the cache."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from offspec import SamplingParams
from offspec.engine.sequence import RunningSequence
from offspec.server import service as services
from tests.support.live_server import LiveServer
from tests.support.tiny_models import tiny_engine, write_model
from tests.support.waiting import PATIENCE, wait_until

PROMPT = [3 + (7 * i * i + i) % 90 for i in range(300)]
OTHER = [*PROMPT[:20], *(3 + (11 * i * i + 5 * i) % 90 for i in range(60))]
TOKENS = 6


class Hold:
    """Pauses the first pass after two layers until `gate` is set or its requests are halted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.gate = threading.Event(), threading.Event()
        self.halted = False
        tell = RunningSequence.on_progress

        def held(own: RunningSequence, layer: int, *given: Any) -> None:
            if layer == 2 and not self.gate.is_set():
                self.begun.set()
                wait_until(lambda: self.gate.is_set() or own.halted)
                self.halted = own.halted
                self.gate.set()
            tell(own, layer, *given)

        monkeypatch.setattr(RunningSequence, "on_progress", held)


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hold]:
    hold = Hold(monkeypatch)
    yield hold
    hold.gate.set()


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("hostile") / "model", "qwen2", seed=5)


@pytest.fixture(scope="module")
def expect(tiny_folder: Path) -> Iterator[Callable[[list[int], float], str]]:
    """The text without a server, a draft or a cache."""
    with tiny_engine(tiny_folder, "none", budget=1, context=512) as engine:

        def text(prompt: list[int], temperature: float) -> str:
            params = SamplingParams(temperature=temperature, seed=7, max_tokens=TOKENS, ignore_eos=True)
            engine._states.first.forget()
            return engine.generate(prompt, params).text

        yield text


@contextmanager
def serving(folder: Path, draft: Path | str = "none", sequences: int = 1) -> Iterator[LiveServer]:
    with LiveServer(tiny_engine(folder, draft, context=512, sequences=sequences)) as server:
        yield server


def send(
    server: LiveServer, prompt: list[int], temperature: float = 0, stream: bool = False
) -> HTTPConnection:
    """Send a request without reading the response."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "seed": 7}
    connection = HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    connection.request(
        "POST",
        "/v1/completions",
        json.dumps({**body, "temperature": temperature, "stream": stream}),
        {"content-type": "application/json"},
    )
    return connection


def ask(server: LiveServer, prompt: list[int], temperature: float = 0) -> tuple[str, int]:
    """Return the text and the cached tokens of an answer."""
    connection = send(server, prompt, temperature)
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def leave(server: LiveServer, connection: HTTPConnection, others: int = 0) -> None:
    """Close a connection, and wait until the server notices, with this many other requests waiting."""
    connection.close()
    wait_until(lambda: len(server.server.server_state.tasks) == others)


@pytest.mark.parametrize(
    ("stream", "temperature", "draft", "sequences", "at_once"),
    [
        (False, 0.0, "hostile", 1, False),
        (True, 0.9, "hostile", 1, True),
        (True, 0.0, "none", 2, False),
        (False, 0.9, "hostile", 2, True),
    ],
)
def test_retry_reuses_computed_prompt(
    stream: bool,
    temperature: float,
    draft: str,
    sequences: int,
    at_once: bool,
    tiny_folder: Path,
    hostile: Path,
    hold: Hold,
    expect: Callable[[list[int], float], str],
) -> None:
    """at_once: the retry arrives while the prompt is still being computed, and waits for it."""
    source = hostile if draft == "hostile" else draft
    with serving(tiny_folder, source, sequences) as server, ThreadPoolExecutor(1) as pool:
        gone = send(server, PROMPT, temperature, stream)
        assert hold.begun.wait(PATIENCE)
        leave(server, gone)
        if at_once:
            retry = pool.submit(ask, server, PROMPT, temperature)
            wait_until(lambda: server.service.in_flight == 2)
            hold.gate.set()
        else:
            hold.gate.set()
            server.wait_until_idle()
            retry = pool.submit(ask, server, PROMPT, temperature)
        assert retry.result() == (expect(PROMPT, temperature), len(PROMPT) - 1)
    assert not hold.halted


@pytest.mark.parametrize("sequences", [1, 2])
def test_another_request_ends_abandoned_prefill(
    sequences: int, tiny_folder: Path, hold: Hold, expect: Callable[[list[int], float], str]
) -> None:
    """Nothing is reused from a pass that was interrupted between layers."""
    with serving(tiny_folder, "none", sequences) as server:
        gone = send(server, PROMPT)
        assert hold.begun.wait(PATIENCE)
        leave(server, gone)
        assert ask(server, OTHER) == (expect(OTHER, 0), 0)
        assert hold.halted
        text, cached = ask(server, PROMPT)
        assert text == expect(PROMPT, 0) and cached <= 20, "the tokens that OTHER begins with"


def test_disconnect_ends_prefill_if_other_clients_wait(tiny_folder: Path, hold: Hold) -> None:
    with serving(tiny_folder) as server, ThreadPoolExecutor(1) as pool:
        gone = send(server, PROMPT)
        assert hold.begun.wait(PATIENCE)
        other = pool.submit(ask, server, OTHER)
        wait_until(lambda: server.service.queue_length == 1)
        leave(server, gone, others=1)
        other.result()
    assert hold.halted


def test_server_stop_ends_abandoned_prefill(tiny_folder: Path, hold: Hold) -> None:
    with serving(tiny_folder) as server:
        gone = send(server, PROMPT)
        assert hold.begun.wait(PATIENCE)
        leave(server, gone)
        server.stop()
        assert hold.halted


def test_abandoned_prefill_times_out_unless_a_client_waits(
    tiny_folder: Path, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "_FINISH_S", 0)
    with serving(tiny_folder) as server, server.http() as http:
        gone = send(server, PROMPT)
        assert hold.begun.wait(PATIENCE)
        retry = send(server, PROMPT)
        wait_until(lambda: server.service.queue_length == 1)
        leave(server, gone, others=1)
        assert http.get("/health").json()["waiting"] == 1  # so the time is over
        assert not hold.gate.is_set(), "it was halted"
        leave(server, retry)
        server.wait_until_idle()
    assert hold.halted
