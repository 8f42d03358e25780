"""OpenAI's Chat Completions: POST /v1/chat/completions."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from offspec.core.events import PassProgress, PassStats, Prefill, TreeSeen
from offspec.server.answer import Answer
from offspec.server.exchange import (
    Ask,
    Called,
    Ended,
    EngineEvent,
    LikelyToken,
    Said,
    Thought,
    TokenChoice,
    Usage,
)
from offspec.server.faults import Fault, parse, refuse
from offspec.server.forced_call import checked_choice
from offspec.server.formats import ResponseFormat, StructuredOutputs, format_of
from offspec.server.openai_common import (
    DONE,
    MOST_MESSAGES,
    UNLIMITED,
    ChoosingTokens,
    Positive,
    StreamOptions,
    error_body,
    header,
    usage_body,
)
from offspec.server.openai_messages import ChatMessage, ChosenTool, Tool, as_message, as_tool
from offspec.server.responses import EventStream, event, whole
from offspec.server.service import Service


class Watched(Struct, forbid_unknown_fields=True):
    """What chunks tell of the engine: its progress, and of each pass the figures and the tree."""

    trees: bool = False


class Body(ChoosingTokens, kw_only=True, forbid_unknown_fields=True):
    """A request."""

    model: str
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Positive | None = None
    max_tokens: Positive | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    offspec: Watched | None = None
    # Accepted, without effect.
    user: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    # Known, and accepted only with the value that changes nothing.
    store: bool | None = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    functions: Any = None
    function_call: Any = None
    verbosity: str | None = None


_HARMLESS = {
    "store": False,
    "modalities": ["text"],
    "audio": None,
    "prediction": None,
    "web_search_options": None,
    "functions": None,
    "function_call": None,
    "verbosity": "medium",
}


_NAMES = {Prefill: "prefill", PassProgress: "progress", TreeSeen: "tree", PassStats: "pass"}


async def create(request: Request) -> Response:
    """An answer to a conversation."""
    service: Service = request.app.state.service
    body = parse(await request.body(), Body)
    service.check_name(body.model)
    answer = await service.answer(_ask(body, service))
    if body.stream:
        return EventStream(answer, _events(answer, body), lambda fault: event(error_body(fault)))
    return await whole(request.receive, answer, lambda answer: _completion(answer, body))


def _ask(body: Body, service: Service) -> Ask:
    """What a body asks for. Raises Fault for what is not supported."""
    refuse({name: getattr(body, name) for name in _HARMLESS}, _HARMLESS)
    if body.top_logprobs is not None and not body.logprobs:
        raise Fault("invalid_request", "top_logprobs: it needs logprobs", field="top_logprobs")
    if body.stream_options is not None and not body.stream:
        raise Fault("invalid_request", "stream_options: they need stream", field="stream_options")
    trees = body.offspec is not None and body.offspec.trees
    if trees and not body.stream:
        raise Fault("invalid_request", "offspec.trees: they need stream", field="offspec.trees")
    template = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        template.setdefault("reasoning_effort", body.reasoning_effort)
    return Ask(
        prompt=[as_message(message, at) for at, message in enumerate(body.messages)],
        params=body.sampling(
            service.defaults,
            max_tokens=body.max_completion_tokens or body.max_tokens or UNLIMITED,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            format=format_of(body.response_format, body.structured_outputs),
        ),
        tools=tuple(map(as_tool, body.tools or ())),
        tool_choice=_tool_choice(body),
        parallel_calls=body.parallel_tool_calls is not False,
        template=template,
        choices=body.n or 1,
        trees=trees,
    )


def _tool_choice(body: Body) -> str:
    choice, names = body.tool_choice or "auto", [tool.function.name for tool in body.tools or ()]
    if isinstance(choice, ChosenTool):
        return checked_choice("auto", choice.function.name, names)
    return checked_choice(choice, None, names)


async def _events(answer: Answer, body: Body) -> AsyncGenerator[bytes, None]:
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
                more = {"logprobs": _logprobs(item.logprobs)} if body.logprobs else {}
                yield chunk(item.choice, {"content": item.text}, **more)
            case Thought():
                yield chunk(item.choice, {"reasoning_content": item.text})
            case Called():
                yield chunk(item.choice, {"tool_calls": [_call_delta(item)]})
            case Ended():
                yield chunk(item.choice, {}, finish_reason=item.reason)
            case EngineEvent():
                seen = {_NAMES[type(item.event)]: item.event}
                yield event({**head, "choices": [], **extra, "offspec": seen})
            case Usage() if with_usage:
                yield event({**head, "choices": [], "usage": usage_body(item)})
    yield DONE


def _call_delta(item: Called) -> dict[str, Any]:
    function = {"arguments": item.arguments}
    if not item.name:
        return {"index": item.index, "function": function}
    return {
        "index": item.index,
        "id": item.id,
        "type": "function",
        "function": {"name": item.name, **function},
    }


class _Choice:
    """A choice, gathered."""

    def __init__(self, index: int) -> None:
        self.index, self.reason = index, "stop"
        self.text, self.thought = list[str](), list[str]()
        self.calls = dict[int, dict[str, Any]]()
        self.logprobs = list[TokenChoice]()

    def hear(self, item: Said | Thought | Called | Ended) -> None:
        match item:
            case Said():
                self.text.append(item.text)
                self.logprobs += item.logprobs
            case Thought():
                self.thought.append(item.text)
            case Called():
                fresh = {"id": item.id, "type": "function", "function": {"name": item.name, "arguments": ""}}
                self.calls.setdefault(item.index, fresh)["function"]["arguments"] += item.arguments
            case Ended():
                self.reason = item.reason

    def body(self, with_logprobs: bool) -> dict[str, Any]:
        text = "".join(self.text)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if self.calls else "")}
        message["refusal"] = None
        if self.thought:
            message["reasoning_content"] = "".join(self.thought)
        if self.calls:
            message["tool_calls"] = list(self.calls.values())
        logprobs = _logprobs(self.logprobs) if with_logprobs else None
        return {"index": self.index, "message": message, "logprobs": logprobs, "finish_reason": self.reason}


async def _completion(answer: Answer, body: Body) -> dict[str, Any]:
    """A whole answer."""
    choices, usage = [_Choice(index) for index in range(body.n or 1)], {}
    async for item in answer:
        if isinstance(item, Usage):
            usage = usage_body(item)
        elif not isinstance(item, EngineEvent):
            choices[item.choice].hear(item)
    return {
        **header("chat.completion", "chatcmpl", body.model),
        "choices": [choice.body(bool(body.logprobs)) for choice in choices],
        "usage": usage,
    }


def _logprobs(tokens: Sequence[TokenChoice]) -> dict[str, Any]:
    content = [{**_token(each.chosen), "top_logprobs": [_token(one) for one in each.top]} for each in tokens]
    return {"content": content, "refusal": None}


def _token(token: LikelyToken) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.utf8)}
