"""litellm, a client for both APIs, if it is installed."""

import json
import os
from typing import Any

import pytest

from tests.server.answers import BOTH, TOOLS
from tests.support.fake_engine import ScriptedEngine
from tests.support.live_server import NAME, LiveServer
from tests.support.waiting import PATIENCE

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it requests prices from another host
litellm: Any = pytest.importorskip("litellm", exc_type=ImportError)
pytest.importorskip("mcp", reason="litellm needs it for tools")
pytestmark = pytest.mark.filterwarnings("ignore")  # its own and its dependencies'
MESSAGES = [{"role": "user", "content": "How is Oslo?"}]
SCHEMA = {"type": "object", "properties": {"sky": {"const": "blue"}}, "required": ["sky"]}


@pytest.fixture(params=["openai", "anthropic"])
def fields(request: pytest.FixtureRequest, served: LiveServer, engine: ScriptedEngine) -> dict[str, Any]:
    engine.answers = [BOTH]
    base = served.url + ("/v1" if request.param == "openai" else "")
    given = {"api_base": base, "api_key": "none", "messages": MESSAGES, "timeout": PATIENCE}
    return {"model": f"{request.param}/{NAME}", **given}


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_text_and_calls(fields: dict[str, Any], stream: bool) -> None:
    """The client joins a stream."""
    answer = litellm.completion(**fields, tools=TOOLS, stream=stream)
    (choice,) = (litellm.stream_chunk_builder(list(answer)) if stream else answer).choices
    message = choice.message
    assert (message.content, message.reasoning_content) == ("I look.", "Which city? Oslo.")
    made = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
    assert made == [("weather", {"city": "Oslo"}), ("time", {"city": "Rome"})]
    assert choice.finish_reason == "tool_calls"


def test_formats(fields: dict[str, Any], engine: ScriptedEngine) -> None:
    engine.answers = ['{"sky": "blue"}']
    format = {"type": "json_schema", "json_schema": {"name": "sky", "schema": SCHEMA}}
    (choice,) = litellm.completion(**fields, response_format=format).choices
    assert json.loads(choice.message.content) == {"sky": "blue"} and choice.finish_reason == "stop"
    assert engine.requests[-1].params.format is not None


def test_unknown_model(fields: dict[str, Any]) -> None:
    with pytest.raises(litellm.NotFoundError, match="not served here"):
        litellm.completion(**{**fields, "model": fields["model"].replace(NAME, "other")})
