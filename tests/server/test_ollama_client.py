"""Ollama's own client, if it is installed."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.answers import BOTH, TOOLS
from tests.support.fake_engine import ScriptedEngine
from tests.support.live_server import NAME, LiveServer
from tests.support.waiting import PATIENCE

ollama: Any = pytest.importorskip("ollama", exc_type=ImportError)
MESSAGES = [{"role": "user", "content": "How is Oslo?"}]


@pytest.fixture
def client(served: LiveServer, engine: ScriptedEngine) -> Iterator[Any]:
    engine.answers = [BOTH]
    client = ollama.Client(served.url, timeout=PATIENCE, trust_env=False)
    yield client
    client._client.close()


def test_whole_answer(client: Any) -> None:
    answer = client.chat(NAME, MESSAGES, tools=TOOLS, think=True, options={"num_predict": 500})
    assert (answer.message.thinking, answer.message.content) == ("Which city? Oslo.", "I look.")
    made = [(call.function.name, call.function.arguments) for call in answer.message.tool_calls]
    assert made == [("weather", {"city": "Oslo"}), ("time", {"city": "Rome"})]
    assert (answer.done_reason, answer.eval_count > 4, answer.total_duration > 0) == ("stop", True, True)
    results = [{"role": "tool", "content": "rain", "tool_name": "weather"}]
    assert client.chat(NAME, [*MESSAGES, answer.message, *results]).message.content


def test_streamed_answer(client: Any) -> None:
    *parts, last = client.generate(NAME, "How is Oslo?", stream=True)
    assert "".join(part.thinking or "" for part in parts) == "Which city? Oslo."
    assert "".join(part.response for part in parts).startswith("I look.")
    assert last.done and last.done_reason == "stop"


def test_models(client: Any) -> None:
    (model,) = client.list().models
    assert (model.model, model.details.parameter_size) == (f"{NAME}:latest", "135.00M")
    assert client.ps().models[0].context_length == 4096
    shown = client.show(model.model)
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.modelinfo["llama.context_length"] == 4096
    with pytest.raises(ollama.ResponseError, match="'other' is not served here") as refused:
        client.chat("other", MESSAGES)
    assert refused.value.status_code == 404
