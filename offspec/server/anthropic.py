"""Anthropic's Messages: POST /v1/messages and /v1/messages/count_tokens."""

from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.responses import Response

from offspec.server.anthropic_messages import Block, InputMessage, Tool, ToolChoice, as_messages, tools_of
from offspec.server.anthropic_reply import MessageReply
from offspec.server.endpoint import ApiRequest
from offspec.server.exchange import Ask
from offspec.server.formats import checked
from offspec.server.openai_common import (
    MOST_MESSAGES,
    ChoosingTokens,
    Limit,
    Texts,
    answer_limit,
    template_variables,
)
from offspec.server.reply import json_response, respond


class Thinking(msgspec.Struct):
    """Whether to think first; "adaptive" leaves it to the chat template."""

    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(msgspec.Struct):
    """What the answer must look like."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    """How to answer."""

    effort: str | None = None
    format: OutputFormat | None = None


class Counted(ChoosingTokens, kw_only=True):
    """Fields that make a prompt."""

    model: str = ""
    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=MOST_MESSAGES)]
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # another place for output_config.format
    chat_template_kwargs: dict[str, Any] | None = None


class Body(Counted, kw_only=True):
    """A request. max_tokens: 0 reads the prompt and answers nothing."""

    max_tokens: Limit
    stop_sequences: Texts | None = None
    stream: bool | None = None


async def create(request: ApiRequest[Body]) -> Response:
    """Answer a conversation."""
    body = request.body
    stop = {} if body.stop_sequences is None else {"stop": body.stop_sequences}
    most = 1 if body.max_tokens == 0 else answer_limit(body.max_tokens)
    ask = replace(_ask(request, max_tokens=most, **stop), silent=body.max_tokens == 0)
    answer = await request.service.answer(ask)
    return respond(answer, MessageReply(body.stream, body.model, len(answer.ids)))


async def count_tokens(request: ApiRequest[Counted]) -> Response:
    """Count the tokens of a prompt, of any length."""
    return json_response({"input_tokens": await request.service.count(_ask(request))})


def _ask(request: ApiRequest[Body] | ApiRequest[Counted], **more: Any) -> Ask:
    """The request of a body. Raises Fault for what is not supported."""
    body = request.body
    output = body.output_config or OutputConfig()
    if (format := output.format or body.output_format) is not None:
        more["format"] = checked("output_config.format.schema", "json_schema", format.schema)
    thinking = None if body.thinking is None or body.thinking.type == "adaptive" else body.thinking.type
    return Ask(
        prompt=as_messages(body.system, body.messages, request.ignore),
        params=body.sampling(request.service.defaults, **more),
        tools=tools_of(body.tools or (), body.tool_choice, request.ignore),
        parallel_calls=body.tool_choice is None or not body.tool_choice.disable_parallel_tool_use,
        template=template_variables(
            body.chat_template_kwargs, output.effort, None if thinking is None else thinking == "enabled"
        ),
    )
