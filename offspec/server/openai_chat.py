"""OpenAI's Chat Completions API: POST /v1/chat/completions."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Meta, Struct
from starlette.responses import Response

from offspec.core.config import SamplingParams
from offspec.core.events import PassProgress, PassStats, Prefill, TreeSeen
from offspec.server.api_errors import invalid, refuse
from offspec.server.endpoint import ApiRequest
from offspec.server.openai_common import (
    MAX_MESSAGES,
    ChunkedBody,
    ChunkedReply,
    Limit,
    answer_limit,
    logprob_body,
    template_variables,
)
from offspec.server.openai_messages import ChatMessage, Function, Ignore, Tool, as_message, parse_tools
from offspec.server.protocol import (
    ChoiceFinished,
    ContentDelta,
    Delta,
    GenerateRequest,
    ReasoningDelta,
    ToolCallDelta,
    Usage,
)
from offspec.server.reply import Event, respond
from offspec.server.structured_outputs import ResponseFormat, StructuredOutputs, format_of
from offspec.server.tools import NamedTool, ToolChoice, custom_input


class OffspecOptions(Struct):
    """Field `offspec` of a body. trees: whether a stream has engine events, with the tree of each pass."""

    trees: bool = False


class Reasoning(Struct):
    """Reasoning options, in the format of OpenRouter."""

    effort: str | None = None
    enabled: bool | None = None


class Thinking(Struct):
    """Thinking mode, in the format of DeepSeek and GLM."""

    type: str = "enabled"


class Body(ChunkedBody, kw_only=True):
    """Body of a request."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Limit | None = None
    max_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    functions: list[Function] | None = None  # legacy form of `tools`
    function_call: str | NamedTool | None = None  # legacy form of `tool_choice`
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    reasoning: Reasoning | None = None
    thinking: Thinking | None = None
    enable_thinking: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    offspec: OffspecOptions | None = None
    # Accepted only with the value of `_HARMLESS`.
    store: bool | None = None
    modalities: list[str] | None = None
    audio: Any = None

    @property
    def legacy(self) -> bool:
        """Whether the request uses the legacy form of tool calls."""
        return bool(self.functions) and not self.tools

    @property
    def thinking_enabled(self) -> bool | None:
        """Whether to enable reasoning, from the first field that sets it; None if no field does."""
        if self.enable_thinking is not None:
            return self.enable_thinking
        if self.thinking is not None and self.thinking.type in ("enabled", "disabled"):
            return self.thinking.type == "enabled"
        return None if self.reasoning is None else self.reasoning.enabled


_HARMLESS = {"store": False, "modalities": ["text"], "audio": None}
_NAMES = {Prefill: "prefill", PassProgress: "progress", TreeSeen: "tree", PassStats: "pass"}


async def create(api_request: ApiRequest[Body]) -> Response:
    """Answer a conversation."""
    request = to_request(api_request.body, api_request.service.defaults, api_request.ignore)
    answer = await api_request.service.answer(request)
    return respond(answer, ChatReply(api_request.body, answer.request))


def to_request(body: Body, defaults: SamplingParams, ignore: Ignore) -> GenerateRequest:
    """Convert a body to a generation request. Raises ApiError for unsupported fields."""
    refuse(body, _HARMLESS)
    trees = body.offspec is not None and body.offspec.trees
    if trees and not body.stream:
        raise invalid("offspec.trees", "requires stream to be true")
    effort = body.reasoning_effort or (body.reasoning.effort if body.reasoning else None)
    with_logprobs = body.logprobs or (body.logprobs is None and bool(body.top_logprobs))
    tools = parse_tools(body.tools or (), body.functions or (), _choice(body), ignore)
    return GenerateRequest(
        prompt=[as_message(message, at, ignore) for at, message in enumerate(body.messages)],
        params=body.sampling(
            defaults,
            max_tokens=answer_limit(body.max_completion_tokens, body.max_tokens),
            logprobs=(body.top_logprobs or 0) if with_logprobs else None,
            format=format_of(body.response_format, body.structured_outputs),
        ),
        tools=tools,
        parallel_calls=body.parallel_tool_calls is not False and not body.legacy,
        chat_template_kwargs=template_variables(body.chat_template_kwargs, effort, body.thinking_enabled),
        continue_final_message=_continues(body),
        choices=body.choices,
        trees=trees,
    )


def _choice(body: Body) -> str | ToolChoice | None:
    legacy = body.function_call
    return body.tool_choice or (ToolChoice(name=legacy.name) if isinstance(legacy, NamedTool) else legacy)


def _continues(body: Body) -> bool:
    """Return whether the answer continues a final message of the assistant. Default: true."""
    if body.continue_final_message is not None:
        return body.continue_final_message
    return body.add_generation_prompt is not True


@dataclass(slots=True)
class _Choice:
    """Contents of a choice so far."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    reason: str = "stop"


class ChatReply(ChunkedReply):
    """Converter of an answer to the Chat Completions API.

    Args:
        body: Body of the request.
        request: Generation request of that body.
    """

    kind, chunk_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, body: Body, request: GenerateRequest) -> None:
        super().__init__(body)
        self._legacy, self._custom = body.legacy, request.tools.custom
        self._with_logprobs = request.params.logprobs is not None
        self._choices = [_Choice() for _ in range(request.choices)]

    def begin(self) -> Iterator[Event]:
        for choice in range(len(self._choices)):
            yield self._chunk(choice, {"role": "assistant", "content": ""})

    def feed(self, delta: Delta) -> Iterator[Event]:
        match delta:
            case ContentDelta(choice=choice, text=text) if text or delta.logprobs:
                tokens = [logprob_body(token) for token in delta.logprobs]
                self._choices[choice].text.append(text)
                self._choices[choice].logprobs += () if self.streamed else tokens
                yield self._chunk(choice, {"content": text}, logprobs=self._logprobs(tokens))
            case ReasoningDelta(choice=choice, text=text):
                self._choices[choice].reasoning.append(text)
                yield self._chunk(choice, {"reasoning_content": text})
            case ToolCallDelta(choice=choice):
                call = self._call(delta)
                self._choices[choice].calls.append(call)
                yield self._chunk(choice, self._calls([{"index": delta.index, **call}]))
            case ChoiceFinished(choice=choice, reason=reason):
                finish = "function_call" if self._legacy and reason == "tool_calls" else reason
                self._choices[choice].reason = finish
                yield self._chunk(choice, {}, finish_reason=finish)
            case Usage():
                self.usage += delta
            case Prefill() | PassProgress() | TreeSeen() | PassStats():
                yield self.chunk(offspec={_NAMES[type(delta)]: delta})

    def choice_bodies(self) -> Iterator[dict[str, Any]]:
        for index, choice in enumerate(self._choices):
            content = "".join(choice.text) or (None if choice.calls else "")
            message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
            if choice.reasoning:
                message["reasoning_content"] = "".join(choice.reasoning)
            if choice.calls:
                message |= self._calls(choice.calls)
            logprobs = self._logprobs(choice.logprobs)
            yield {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.reason}

    def _chunk(self, choice: int, delta: dict[str, Any], **more: Any) -> Event:
        return self.chunk({"index": choice, "delta": delta, "logprobs": None, "finish_reason": None, **more})

    def _calls(self, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the field of a message that contains its calls."""
        return {"function_call": calls[0]["function"]} if self._legacy else {"tool_calls": calls}

    def _call(self, call: ToolCallDelta) -> dict[str, Any]:
        if call.name in self._custom:
            custom = {"name": call.name, "input": custom_input(call.arguments)}
            return {"id": call.id, "type": "custom", "custom": custom}
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": call.id, "type": "function", "function": function}

    def _logprobs(self, tokens: list[dict[str, Any]]) -> dict[str, Any] | None:
        return {"content": tokens, "refusal": None} if self._with_logprobs else None
