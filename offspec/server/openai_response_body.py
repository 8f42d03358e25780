"""The body of a request to OpenAI's Responses."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from offspec.server.openai_common import MOST_MESSAGES, ChoosingTokens, Limit, StreamOptions
from offspec.server.openai_items import Item, Tool
from offspec.server.tools import ToolChoice

LOGPROBS = "message.output_text.logprobs"


class TextFormat(msgspec.Struct):
    """The format of the answer. name, description: accepted, without effect."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema: dict[str, Any] | None = None
    name: Any = None
    description: Any = None


class TextConfig(msgspec.Struct):
    """Options of the answer's text."""

    format: TextFormat | None = None


class Reasoning(msgspec.Struct):
    """How much to reason."""

    effort: str | None = None


class Body(ChoosingTokens, kw_only=True):
    """A request."""

    model: str = ""
    input: str | Annotated[list[Item], Meta(min_length=1, max_length=MOST_MESSAGES)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: Limit | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # Accepted only with a value that changes nothing.
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None


HARMLESS: dict[str, Any] = {"background": False}
REFUSED = ("background", "conversation", "prompt")
