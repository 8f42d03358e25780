"""OpenAI's Chat Completions: POST /v1/chat/completions."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from offspec.core.events import PassProgress, PassStats, Prefill, TreeSeen
from offspec.server.delta_stream import DeltaStream
from offspec.server.exchange import (
    Ask,
    Called,
    Ended,
    EndReason,
    EngineEvent,
    LikelyToken,
    Said,
    Thought,
    TokenChoice,
    Usage,
)
from offspec.server.faults import Fault, refuse
from offspec.server.formats import ResponseFormat, StructuredOutputs, format_of
from offspec.server.openai_common import (
    DONE,
    MOST_MESSAGES,
    ChoosingTokens,
    Limit,
    StreamOptions,
    answer_limit,
    error_body,
    header,
    template_variables,
    usage_body,
)
from offspec.server.openai_messages import ChatMessage, Function, Ignore, Tool, as_message, tools_of
from offspec.server.reading import read_body, report_ignored
from offspec.server.responses import EventStream, WholeAnswer, event
from offspec.server.service import Service
from offspec.server.tools import NamedTool, ToolChoice, Tools, custom_input


class Watched(Struct):
    """Events of the engine in the chunks of a stream: its progress, and figures and tree of each pass."""

    trees: bool = False


class Reasoning(Struct):
    """How to reason, as OpenRouter has it."""

    effort: str | None = None
    enabled: bool | None = None


class Thinking(Struct):
    """Whether to think first, as DeepSeek and GLM have it."""

    type: str = "enabled"


class Body(ChoosingTokens, kw_only=True):
    """A request."""

    model: str = ""
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Limit | None = None
    max_tokens: Limit | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    functions: list[Function] | None = None  # the legacy form of tools, and of their choice
    function_call: str | NamedTool | None = None
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
    offspec: Watched | None = None
    # Accepted only with a value that changes nothing.
    store: bool | None = None
    modalities: list[str] | None = None
    audio: Any = None

    @property
    def legacy(self) -> bool:
        """Whether calls are asked for in the legacy form."""
        return bool(self.functions) and not self.tools

    @property
    def thinks(self) -> bool | None:
        """Whether to think, by those fields that say so."""
        if self.enable_thinking is not None:
            return self.enable_thinking
        if self.thinking is not None and self.thinking.type in ("enabled", "disabled"):
            return self.thinking.type == "enabled"
        return None if self.reasoning is None else self.reasoning.enabled


_HARMLESS = {"store": False, "modalities": ["text"], "audio": None}
_NAMES = {Prefill: "prefill", PassProgress: "progress", TreeSeen: "tree", PassStats: "pass"}


async def create(request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    body = await read_body(request, Body)
    body.model = service.check_name(body.model)
    ask = _ask(body, service, lambda path: report_ignored(request, (path,)))
    answer = await service.answer(ask)
    if body.stream:
        return EventStream(answer, _events(answer, body), lambda fault: event(error_body(fault)))
    return WholeAnswer(answer, _completion(answer, body), error_body)


def _ask(body: Body, service: Service, ignore: Ignore) -> Ask:
    """The request of a body. Raises Fault for what is not supported."""
    refuse({name: getattr(body, name) for name in _HARMLESS}, _HARMLESS)
    trees = body.offspec is not None and body.offspec.trees
    if trees and not body.stream:
        raise Fault("invalid_request", "offspec.trees: they need stream", field="offspec.trees")
    effort = body.reasoning_effort or (body.reasoning.effort if body.reasoning else None)
    with_logprobs = body.logprobs or (body.logprobs is None and bool(body.top_logprobs))
    tools = tools_of(body.tools or (), body.functions or (), _choice(body), ignore)
    return Ask(
        prompt=[as_message(message, at, ignore) for at, message in enumerate(body.messages)],
        params=body.sampling(
            service.defaults,
            max_tokens=answer_limit(body.max_completion_tokens, body.max_tokens),
            logprobs=(body.top_logprobs or 0) if with_logprobs else None,
            format=format_of(body.response_format, body.structured_outputs),
        ),
        tools=tools,
        parallel_calls=body.parallel_tool_calls is not False and not body.legacy,
        template=template_variables(body.chat_template_kwargs, effort, body.thinks),
        continues=_continues(body),
        choices=body.n or 1,
        trees=trees,
    )


def _choice(body: Body) -> str | ToolChoice | None:
    legacy = body.function_call
    return body.tool_choice or (ToolChoice(name=legacy.name) if isinstance(legacy, NamedTool) else legacy)


def _continues(body: Body) -> bool:
    """Whether a last message of the assistant is continued; by default it is."""
    if body.continue_final_message is not None:
        return body.continue_final_message
    return body.add_generation_prompt is not True


async def _events(answer: DeltaStream, body: Body) -> AsyncGenerator[bytes, None]:
    """The chunks of a streamed answer."""
    head = header("chat.completion.chunk", "chatcmpl", body.model)
    with_usage = body.stream_options is not None and body.stream_options.include_usage
    extra = {"usage": None} if with_usage else {}

    def chunk(choice: int, delta: Mapping[str, Any], **more: Any) -> bytes:
        found = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return event({**head, "choices": [found], **extra})

    for choice in range(body.n or 1):
        yield chunk(choice, {"role": "assistant", "content": ""})
    async for item in answer:
        match item:
            case Said() if item.text or item.logprobs:
                more = {"logprobs": _logprobs(item.logprobs)} if answer.with_logprobs else {}
                yield chunk(item.choice, {"content": item.text}, **more)
            case Thought():
                yield chunk(item.choice, {"reasoning_content": item.text})
            case Called():
                yield chunk(item.choice, _call_delta(item, body, answer.ask.tools))
            case Ended():
                yield chunk(item.choice, {}, finish_reason=_reason(item.reason, body))
            case EngineEvent():
                seen = {_NAMES[type(item.event)]: item.event}
                yield event({**head, "choices": [], **extra, "offspec": seen})
            case Usage() if with_usage:
                yield event({**head, "choices": [], "usage": usage_body(item)})
    yield DONE


def _call(item: Called, tools: Tools) -> dict[str, Any]:
    """A whole call."""
    if item.name in tools.custom:
        made = {"name": item.name, "input": custom_input(item.arguments)}
        return {"id": item.id, "type": "custom", "custom": made}
    made = {"name": item.name, "arguments": item.arguments}
    return {"id": item.id, "type": "function", "function": made}


def _call_delta(item: Called, body: Body, tools: Tools) -> dict[str, Any]:
    call = _call(item, tools)
    if body.legacy:
        return {"function_call": call["function"]}
    return {"tool_calls": [{"index": item.index, **call}]}


def _reason(reason: EndReason, body: Body) -> str:
    return "function_call" if body.legacy and reason == "tool_calls" else reason


class _Choice:
    """The message of a choice, gathered from its events."""

    def __init__(self, index: int, body: Body, tools: Tools) -> None:
        self.index, self.reason = index, "stop"
        self._body, self._tools = body, tools
        self.text, self.thought = list[str](), list[str]()
        self.calls = list[dict[str, Any]]()
        self.logprobs = list[TokenChoice]()

    def hear(self, item: Said | Thought | Called | Ended) -> None:
        match item:
            case Said():
                self.text.append(item.text)
                self.logprobs += item.logprobs
            case Thought():
                self.thought.append(item.text)
            case Called():
                self.calls.append(_call(item, self._tools))
            case Ended():
                self.reason = _reason(item.reason, self._body)

    def shown(self, with_logprobs: bool) -> dict[str, Any]:
        text = "".join(self.text)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if self.calls else "")}
        message["refusal"] = None
        if self.thought:
            message["reasoning_content"] = "".join(self.thought)
        if self.calls and self._body.legacy:
            message["function_call"] = self.calls[0]["function"]
        elif self.calls:
            message["tool_calls"] = self.calls
        logprobs = _logprobs(self.logprobs) if with_logprobs else None
        return {"index": self.index, "message": message, "logprobs": logprobs, "finish_reason": self.reason}


async def _completion(answer: DeltaStream, body: Body) -> dict[str, Any]:
    """A whole answer."""
    tools, usage = answer.ask.tools, dict[str, Any]()
    choices = [_Choice(index, body, tools) for index in range(body.n or 1)]
    async for item in answer:
        if isinstance(item, Usage):
            usage = usage_body(item)
        elif not isinstance(item, EngineEvent):
            choices[item.choice].hear(item)
    return {
        **header("chat.completion", "chatcmpl", body.model),
        "choices": [choice.shown(answer.with_logprobs) for choice in choices],
        "usage": usage,
    }


def _logprobs(tokens: Sequence[TokenChoice]) -> dict[str, Any]:
    content = [{**_token(each.chosen), "top_logprobs": [_token(one) for one in each.top]} for each in tokens]
    return {"content": content, "refusal": None}


def _token(token: LikelyToken) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.utf8)}
