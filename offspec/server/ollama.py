"""Ollama's API: POST /api/chat and /api/generate, streamed as JSON lines unless `stream` is false."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from offspec.core.config import SamplingParams
from offspec.core.constraint import Constraint
from offspec.server.api_errors import invalid, ollama_error, refuse, unsupported
from offspec.server.endpoint import read_request
from offspec.server.openai_common import (
    MAX_MESSAGES,
    LlamaFields,
    answer_limit,
    logprob_body,
    template_variables,
)
from offspec.server.openai_messages import Tool, ToolCall, as_call, parse_tools
from offspec.server.protocol import (
    ChoiceFinished,
    ContentDelta,
    Delta,
    GenerateRequest,
    ReasoningDelta,
    ToolCallDelta,
    Usage,
)
from offspec.server.reply import AnswerTimes, Event, Reply, json_line, json_response, respond
from offspec.server.service import Service
from offspec.server.structured_outputs import checked_constraint

# Builds part of an answer from text, reasoning and calls.
Shape = Callable[[str, str, Sequence[dict[str, Any]]], dict[str, Any]]


class Options(LlamaFields, kw_only=True):
    """Sampling options. num_predict: maximum tokens of the answer; below 1: no limit."""

    num_predict: int | None = None


class Message(Struct):
    """Message of the conversation so far. Tool results contain the call's id, or only the tool's name."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    tool_name: str | None = None


class _Body(Struct, kw_only=True):
    """Common fields of /api/chat and /api/generate."""

    model: str = ""
    stream: bool | None = None
    think: bool | str | None = None
    format: str | dict[str, Any] | None = None
    options: Options | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class ChatBody(_Body, kw_only=True):
    """Body of /api/chat."""

    messages: Annotated[list[Message], Meta(max_length=MAX_MESSAGES)] = []
    tools: list[Tool] | None = None


class GenerateBody(_Body, kw_only=True):
    """Body of /api/generate. raw: whether to continue the prompt without the chat template."""

    prompt: str = ""
    system: str | None = None
    suffix: str | None = None
    raw: bool | None = None
    # Accepted only if empty or null.
    template: str | None = None
    images: list[Any] | None = None


async def chat(http_request: Request) -> Response:
    """Answer a conversation. A request without messages only loads the model, which is already loaded."""
    api_request = await read_request(http_request, ChatBody)
    service, body = api_request.service, api_request.body
    check_name(service, body.model)
    if not body.messages:
        return _loaded(service, body, chat_shape)
    tools = parse_tools(body.tools or (), (), None, api_request.ignore)
    request = GenerateRequest(
        prompt=_messages(body.messages),
        params=_params(body, service),
        tools=tools,
        chat_template_kwargs=_template(body),
    )
    return await _answer(service, request, body, chat_shape)


async def generate(http_request: Request) -> Response:
    """Answer one prompt. A request without a prompt only loads the model, which is already loaded."""
    api_request = await read_request(http_request, GenerateBody)
    service, body = api_request.service, api_request.body
    check_name(service, body.model)
    refuse(body, {"template": "", "images": None})
    if not body.prompt and not body.suffix:
        return _loaded(service, body, generate_shape)
    system = [{"role": "system", "content": body.system}] if body.system else []
    request = GenerateRequest(
        prompt=body.prompt if body.raw else [*system, {"role": "user", "content": body.prompt}],
        raw=bool(body.raw),
        params=_params(body, service),
        chat_template_kwargs=_template(body),
    )
    if body.suffix:
        request = GenerateRequest(prompt=body.prompt, params=request.params)
        request = request.with_suffix(body.suffix, service.engine.model_info)
    return await _answer(service, request, body, generate_shape)


def check_name(service: Service, name: str) -> None:
    """Raise ApiError for an unknown model name. Names may end in ":latest"."""
    service.check_name(name if name in service.names else name.removesuffix(":latest"))


def _params(body: _Body, service: Service) -> SamplingParams:
    options = body.options or Options()
    return options.sampling(
        service.defaults,
        max_tokens=answer_limit(options.num_predict),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        format=_format(body.format),
    )


def _format(format: str | dict[str, Any] | None) -> Constraint | None:
    """Return the answer format of a body, or None for plain text. Raises ApiError if it is invalid."""
    if isinstance(format, dict):
        return checked_constraint("format", "json_schema", format)
    if format not in (None, "", "json"):
        raise invalid("format", 'it must be "json" or a JSON schema')
    return Constraint("json_object") if format else None


def _template(body: _Body) -> dict[str, Any]:
    """Return variables of the chat template. `think` is a bool, or an effort such as "low"."""
    effort, thinks = (body.think, None) if isinstance(body.think, str) else (None, body.think)
    return template_variables(None, effort, thinks)


def _messages(body_messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Convert messages for the chat template. Calls and results get ids, which some templates need."""
    messages, open_calls = list[dict[str, Any]](), list[dict[str, Any]]()
    for at, message in enumerate(body_messages):
        if message.images:
            raise unsupported(f"messages[{at}].images", "images are not supported, only text")
        converted: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.thinking:
            converted["reasoning_content"] = message.thinking
        if message.tool_calls:
            converted["tool_calls"] = [as_call(call) for call in message.tool_calls]
            for place, call in enumerate(converted["tool_calls"]):
                call["id"] = call["id"] or f"c{at % 10**5:05}{place % 10**3:03}"
            open_calls += converted["tool_calls"]
        if message.role == "tool":
            converted |= _result_of(message, open_calls)
        messages.append(converted)
    return messages


def _result_of(message: Message, open_calls: list[dict[str, Any]]) -> dict[str, str]:
    """Return the id and name of the call for a tool result: the call it names, or the first open call."""
    id, name = message.tool_call_id or "", message.tool_name or ""
    for at, call in enumerate(open_calls):
        if (id or call["id"], name or call["function"]["name"]) == (call["id"], call["function"]["name"]):
            del open_calls[at]
            return {"tool_call_id": call["id"], "name": call["function"]["name"]}
    return {key: value for key, value in (("tool_call_id", id), ("name", name)) if value}


async def _answer(service: Service, request: GenerateRequest, body: _Body, shape: Shape) -> Response:
    reply = OllamaReply(body.stream is not False, body.model or service.names[0], shape)
    return respond(await service.answer(request), reply)


def _loaded(service: Service, body: _Body, shape: Shape) -> Response:
    """Return the response to a request that only loads the model. Raises ApiError until it is loaded."""
    assert service.engine
    reply = OllamaReply(False, body.model or service.names[0], shape)
    return json_response({**reply.part(), "done": True, "done_reason": "load"})


def written_time(seconds: float | None = None) -> str:
    """Return a time in Ollama's format. seconds: since 1970; None for now."""
    at = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return at.isoformat().replace("+00:00", "Z")


def chat_shape(text: str, reasoning: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return part of an answer in the format of /api/chat."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["thinking"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return {"message": message}


def generate_shape(text: str, reasoning: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return part of an answer in the format of /api/generate."""
    return {"response": text, "thinking": reasoning} if reasoning else {"response": text}


class OllamaReply(Reply):
    """Converter of an answer to Ollama's API: JSON lines, or one object.

    Args:
        streamed: See `Reply`.
        model: Name of the model.
        shape: Builds the fields for text, reasoning and calls.
    """

    media_type = "application/x-ndjson"
    error_body = staticmethod(ollama_error)

    def __init__(self, streamed: bool, model: str, shape: Shape) -> None:
        super().__init__(streamed)
        self._model, self._shape = model, shape
        self._times = AnswerTimes()
        self._reason, self._usage = "stop", Usage()
        self._collected: dict[str, Any] = {"text": "", "reasoning": "", "calls": [], "logprobs": []}

    def part(
        self,
        text: str = "",
        reasoning: str = "",
        calls: Sequence[dict[str, Any]] = (),
        logprobs: Sequence[dict[str, Any]] = (),
    ) -> dict[str, Any]:
        """Return an object with part of the answer."""
        more = {"logprobs": logprobs} if logprobs else {}
        head = {"model": self._model, "created_at": written_time()}
        return {**head, **self._shape(text, reasoning, calls), "done": False, **more}

    def feed(self, delta: Delta) -> Iterator[Event]:
        if not (fields := self._fields(delta)):
            return
        self._times.note()
        if not self.streamed:
            for name, value in fields.items():
                self._collected[name] += value
        yield self.part(**fields)

    async def end(self) -> Iterable[Event]:
        return ({**self.part(), **self._end()},)

    def whole(self) -> dict[str, Any]:
        return {**self.part(**self._collected), **self._end()}

    def encode(self, event: Event) -> bytes:
        return json_line(event)

    def keep_alive(self) -> bytes:
        return json_line(self.part())

    def _fields(self, delta: Delta) -> dict[str, Any]:
        """Return the arguments of `part` for a delta, or {} for the end and the usage, which are recorded."""
        match delta:
            case ContentDelta() if delta.text or delta.logprobs:
                return {"text": delta.text, "logprobs": [logprob_body(token) for token in delta.logprobs]}
            case ReasoningDelta():
                return {"reasoning": delta.text}
            case ToolCallDelta():
                call = {"name": delta.name, "arguments": msgspec.json.decode(delta.arguments)}
                return {"calls": [{"id": delta.id, "function": {"index": delta.index, **call}}]}
            case ChoiceFinished():
                self._reason = "length" if delta.reason == "length" else "stop"
            case Usage():
                self._usage = delta
        return {}

    def _end(self) -> dict[str, Any]:
        """Return additional fields of the last object. Durations are in nanoseconds."""
        times = self._times
        return {
            "done": True,
            "done_reason": self._reason,
            "total_duration": times.total,
            "load_duration": 0,
            "prompt_eval_count": self._usage.prompt_tokens,
            "prompt_eval_duration": times.prompt,
            "eval_count": self._usage.answer_tokens,
            "eval_duration": times.answer,
        }
