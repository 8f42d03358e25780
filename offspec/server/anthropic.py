"""Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens."""

import json
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.responses import Response

from offspec.server.anthropic_messages import (
    Block,
    InputMessage,
    Tool,
    ToolChoice,
    parse_tools,
    to_chat_messages,
)
from offspec.server.api_errors import anthropic_error
from offspec.server.endpoint import ApiRequest
from offspec.server.openai_common import (
    MAX_MESSAGES,
    Limit,
    SamplingFields,
    Texts,
    answer_limit,
    template_variables,
)
from offspec.server.protocol import (
    ChoiceFinished,
    ContentDelta,
    Delta,
    GenerateRequest,
    ReasoningDelta,
    ToolCallDelta,
    Usage,
)
from offspec.server.reply import Event, Reply, json_response, respond, sse_event
from offspec.server.structured_outputs import checked_constraint

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
# Clients drop reasoning without a signature. Signatures that they send back are not checked.
_UNSIGNED = "unsigned"


class Thinking(msgspec.Struct):
    """Thinking mode. "adaptive" uses the default of the chat template."""

    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(msgspec.Struct):
    """Format of the answer."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    """Effort and format of the answer."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensBody(SamplingFields, kw_only=True):
    """Request body for counting the tokens of a prompt."""

    model: str = ""
    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # alternative to output_config.format
    chat_template_kwargs: dict[str, Any] | None = None


class Body(CountTokensBody, kw_only=True):
    """Request body for a message. max_tokens: 0 only computes the prompt."""

    max_tokens: Limit
    stop_sequences: Texts | None = None
    stream: bool | None = None


async def create(request: ApiRequest[Body]) -> Response:
    """Answer a conversation."""
    body = request.body
    stop = {} if body.stop_sequences is None else {"stop": body.stop_sequences}
    most = 1 if body.max_tokens == 0 else answer_limit(body.max_tokens)
    generate_request = replace(
        _generate_request(request, max_tokens=most, **stop), prompt_only=body.max_tokens == 0
    )
    answer = await request.service.answer(generate_request)
    return respond(answer, MessageReply(body.stream, body.model, len(answer.ids)))


async def count_tokens(request: ApiRequest[CountTokensBody]) -> Response:
    """Count the tokens of a prompt, which may exceed the context."""
    return json_response({"input_tokens": await request.service.count_tokens(_generate_request(request))})


def _generate_request(
    request: ApiRequest[Body] | ApiRequest[CountTokensBody], **more: Any
) -> GenerateRequest:
    """Convert a body to a generation request. Raises ApiError for unsupported fields."""
    body = request.body
    output = body.output_config or OutputConfig()
    if (format := output.format or body.output_format) is not None:
        more["format"] = checked_constraint("output_config.format.schema", "json_schema", format.schema)
    thinking = None if body.thinking is None or body.thinking.type == "adaptive" else body.thinking.type
    return GenerateRequest(
        prompt=to_chat_messages(body.system, body.messages, request.ignore),
        params=body.sampling(request.service.defaults, **more),
        tools=parse_tools(body.tools or (), body.tool_choice, request.ignore),
        parallel_calls=body.tool_choice is None or not body.tool_choice.disable_parallel_tool_use,
        chat_template_kwargs=template_variables(
            body.chat_template_kwargs, output.effort, None if thinking is None else thinking == "enabled"
        ),
    )


class MessageReply(Reply):
    """Converter of an answer to the Messages API: events of its blocks, or the message.

    Args:
        streamed: See `Reply`.
        model: Name of the model.
        prompt_tokens: Number of prompt tokens.
    """

    error_body = staticmethod(anthropic_error)

    def __init__(self, streamed: bool | None, model: str, prompt_tokens: int) -> None:
        super().__init__(streamed)
        self._message: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": prompt_tokens, "output_tokens": 0},
        }
        self._block: dict[str, Any] | None = None  # the open block

    def begin(self) -> Iterable[Event]:
        return ({"type": "message_start", "message": {**self._message, "content": []}},)

    def feed(self, delta: Delta) -> Iterator[Event]:
        match delta:
            case ContentDelta(text=text) if text:
                yield from self._open("text", text="")
                yield self._add("text_delta", "text", text)
            case ReasoningDelta(text=text):
                yield from self._open("thinking", thinking="", signature="")
                yield self._add("thinking_delta", "thinking", text)
            case ToolCallDelta():
                yield from self._close()
                yield from self._open("tool_use", id=delta.id, name=delta.name, input={})
                assert self._block is not None
                self._block["input"] = json.loads(delta.arguments)
                yield self._delta("input_json_delta", partial_json=delta.arguments)
            case ChoiceFinished():
                reason = "stop_sequence" if delta.stop is not None else _REASONS[delta.reason]
                self._message |= {"stop_reason": reason, "stop_sequence": delta.stop}
            case Usage():
                self._message["usage"] = _usage(delta)

    async def end(self) -> Iterable[Event]:
        ending = {name: self._message[name] for name in ("stop_reason", "stop_sequence")}
        last = {"type": "message_delta", "delta": ending, "usage": self._message["usage"]}
        return (*self._close(), last, {"type": "message_stop"})

    def whole(self) -> dict[str, Any]:
        return self._message

    def encode(self, event: Event) -> bytes:
        return sse_event(event, event["type"])

    def keep_alive(self) -> bytes:
        return self.encode({"type": "ping"})

    def _open(self, kind: str, **fields: Any) -> Iterator[Event]:
        """Open a block unless a block of this kind is open."""
        if self._block is not None and self._block["type"] == kind:
            return
        yield from self._close()
        self._block = {"type": kind, **fields}
        self._message["content"].append(self._block)
        yield {"type": "content_block_start", "index": self._index, "content_block": {**self._block}}

    def _close(self) -> Iterator[Event]:
        if self._block is None:
            return
        if self._block["type"] == "thinking":
            yield self._add("signature_delta", "signature", _UNSIGNED)
        yield {"type": "content_block_stop", "index": self._index}
        self._block = None

    @property
    def _index(self) -> int:
        return len(self._message["content"]) - 1

    def _add(self, kind: str, field: str, text: str) -> Event:
        assert self._block is not None
        self._block[field] += text
        return self._delta(kind, **{field: text})

    def _delta(self, kind: str, **value: str) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, **value}}


def _usage(usage: Usage) -> dict[str, Any]:
    """Return token counts, with cached tokens counted separately."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.answer_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }
