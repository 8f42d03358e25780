"""The body of a request to OpenAI's Responses."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from offspec.server.openai_common import MOST_MESSAGES, ChoosingTokens, Positive, StreamOptions
from offspec.server.openai_items import ChosenTool, FunctionTool, Item

LOGPROBS = "message.output_text.logprobs"


class TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    """What the answer must look like."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    """How text is made."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    """How to think. summary: accepted, without effect; thoughts come as they are."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class Body(ChoosingTokens, kw_only=True, forbid_unknown_fields=True):
    """A request."""

    model: str
    input: str | Annotated[list[Item], Meta(min_length=1, max_length=MOST_MESSAGES)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: Positive | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Accepted, without effect.
    metadata: dict[str, str] | None = None
    user: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    # Known, and accepted only with the value that changes nothing.
    background: bool | None = None
    conversation: Any = None
    context_management: Any = None
    max_tool_calls: int | None = None
    moderation: Any = None
    prompt: Any = None
    truncation: str | None = None


HARMLESS: dict[str, Any] = {
    "background": False,
    "conversation": None,
    "context_management": [],
    "max_tool_calls": None,
    "moderation": None,
    "prompt": None,
    "truncation": "disabled",
    "stop": None,
    "text.verbosity": "medium",
}
