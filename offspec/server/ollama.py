"""Ollama's API: POST /api/chat and /api/generate, streamed as lines of JSON unless `stream` is false."""

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

Shape = Callable[[str, str, Sequence[dict[str, Any]]], dict[str, Any]]  # text, reasoning, and calls


class Options(LlamaFields, kw_only=True):
    """Fields that choose tokens. num_predict: below 1 for no limit."""

    num_predict: int | None = None


class Message(Struct):
    """A message of the conversation so far. Results of tools may name the call, or only the tool."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    tool_name: str | None = None


class _Body(Struct, kw_only=True):
    """Fields of both paths."""

    model: str = ""
    stream: bool | None = None
    think: bool | str | None = None
    format: str | dict[str, Any] | None = None
    options: Options | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class ChatBody(_Body, kw_only=True):
    """A request of /api/chat."""

    messages: Annotated[list[Message], Meta(max_length=MAX_MESSAGES)] = []
    tools: list[Tool] | None = None


class GenerateBody(_Body, kw_only=True):
    """A request of /api/generate. raw: the prompt is continued as it is, without the chat template."""

    prompt: str = ""
    system: str | None = None
    suffix: str | None = None
    raw: bool | None = None
    # Accepted only with the value that changes nothing.
    template: str | None = None
    images: list[Any] | None = None


async def chat(request: Request) -> Response:
    """Answer a conversation. A request without messages only loads the model (already loaded)."""
    given = await read_request(request, ChatBody)
    service, body = given.service, given.body
    check_name(service, body.model)
    if not body.messages:
        return _loaded(service, body, chat_shape)
    tools = parse_tools(body.tools or (), (), None, given.ignore)
    ask = GenerateRequest(
        prompt=_messages(body.messages),
        params=_params(body, service),
        tools=tools,
        chat_template_kwargs=_template(body),
    )
    return await _answer(service, ask, body, chat_shape)


async def generate(request: Request) -> Response:
    """Answer one prompt. A request without a prompt only loads the model (already loaded)."""
    given = await read_request(request, GenerateBody)
    service, body = given.service, given.body
    check_name(service, body.model)
    refuse(body, {"template": "", "images": None})
    if not body.prompt and not body.suffix:
        return _loaded(service, body, generate_shape)
    system = [{"role": "system", "content": body.system}] if body.system else []
    ask = GenerateRequest(
        prompt=body.prompt if body.raw else [*system, {"role": "user", "content": body.prompt}],
        raw=bool(body.raw),
        params=_params(body, service),
        chat_template_kwargs=_template(body),
    )
    if body.suffix:
        ask = GenerateRequest(prompt=body.prompt, params=ask.params)
        ask = ask.with_suffix(body.suffix, service.engine.model_info)
    return await _answer(service, ask, body, generate_shape)


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


def _format(given: str | dict[str, Any] | None) -> Constraint | None:
    """The format of an answer. Raises ApiError."""
    if isinstance(given, dict):
        return checked_constraint("format", "json_schema", given)
    if given not in (None, "", "json"):
        raise invalid("format", 'it must be "json" or a JSON schema')
    return Constraint("json_object") if given else None


def _template(body: _Body) -> dict[str, Any]:
    """Variables of the chat template. `think` is a bool, or an effort such as "low"."""
    effort, thinks = (body.think, None) if isinstance(body.think, str) else (None, body.think)
    return template_variables(None, effort, thinks)


def _messages(given: Iterable[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates take them. Calls and results get ids, which some templates need."""
    messages, open_calls = list[dict[str, Any]](), list[dict[str, Any]]()
    for at, message in enumerate(given):
        if message.images:
            raise unsupported(f"messages[{at}].images", "pictures are not supported, only text")
        found: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.thinking:
            found["reasoning_content"] = message.thinking
        if message.tool_calls:
            found["tool_calls"] = [as_call(call) for call in message.tool_calls]
            for place, call in enumerate(found["tool_calls"]):
                call["id"] = call["id"] or f"c{at % 10**5:05}{place % 10**3:03}"
            open_calls += found["tool_calls"]
        if message.role == "tool":
            found |= _result_of(message, open_calls)
        messages.append(found)
    return messages


def _result_of(message: Message, open_calls: list[dict[str, Any]]) -> dict[str, str]:
    """Return id and name of the call of a tool result: the named call, or the first without a result."""
    id, name = message.tool_call_id or "", message.tool_name or ""
    for at, call in enumerate(open_calls):
        if (id or call["id"], name or call["function"]["name"]) == (call["id"], call["function"]["name"]):
            del open_calls[at]
            return {"tool_call_id": call["id"], "name": call["function"]["name"]}
    return {key: value for key, value in (("tool_call_id", id), ("name", name)) if value}


async def _answer(service: Service, ask: GenerateRequest, body: _Body, shape: Shape) -> Response:
    reply = OllamaReply(body.stream is not False, body.model or service.names[0], shape)
    return respond(await service.answer(ask), reply)


def _loaded(service: Service, body: _Body, shape: Shape) -> Response:
    """Return the answer to a request to load the model. Raises ApiError until it is loaded."""
    assert service.engine
    reply = OllamaReply(False, body.model or service.names[0], shape)
    return json_response({**reply.part(), "done": True, "done_reason": "load"})


def written_time(seconds: float | None = None) -> str:
    """A time as Ollama writes it, by default now."""
    at = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return at.isoformat().replace("+00:00", "Z")


def chat_shape(text: str, thought: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A part of an answer of /api/chat."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thought:
        message["thinking"] = thought
    if calls:
        message["tool_calls"] = calls
    return {"message": message}


def generate_shape(text: str, thought: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A part of an answer of /api/generate."""
    return {"response": text, "thinking": thought} if thought else {"response": text}


class OllamaReply(Reply):
    """An answer in Ollama's API: parts as lines of JSON, or one part.

    Args:
        streamed: See `Reply`.
        model: Name of the model.
        shape: Makes a part from text, reasoning and calls.
    """

    media_type = "application/x-ndjson"
    error_body = staticmethod(ollama_error)

    def __init__(self, streamed: bool, model: str, shape: Shape) -> None:
        super().__init__(streamed)
        self._model, self._shape = model, shape
        self._times = AnswerTimes()
        self._reason, self._usage = "stop", Usage()
        self._gathered: dict[str, Any] = {"text": "", "thought": "", "calls": [], "logprobs": []}

    def part(
        self,
        text: str = "",
        thought: str = "",
        calls: Sequence[dict[str, Any]] = (),
        logprobs: Sequence[dict[str, Any]] = (),
    ) -> dict[str, Any]:
        """A part of the answer."""
        more = {"logprobs": logprobs} if logprobs else {}
        head = {"model": self._model, "created_at": written_time()}
        return {**head, **self._shape(text, thought, calls), "done": False, **more}

    def feed(self, delta: Delta) -> Iterator[Event]:
        if not (given := self._given(delta)):
            return
        self._times.note()
        if not self.streamed:
            for name, value in given.items():
                self._gathered[name] += value
        yield self.part(**given)

    async def end(self) -> Iterable[Event]:
        return ({**self.part(), **self._end()},)

    def whole(self) -> dict[str, Any]:
        return {**self.part(**self._gathered), **self._end()}

    def encode(self, event: Event) -> bytes:
        return json_line(event)

    def keep_alive(self) -> bytes:
        return json_line(self.part())

    def _given(self, delta: Delta) -> dict[str, Any]:
        """Arguments of `part` for a delta."""
        match delta:
            case ContentDelta() if delta.text or delta.logprobs:
                return {"text": delta.text, "logprobs": [logprob_body(token) for token in delta.logprobs]}
            case ReasoningDelta():
                return {"thought": delta.text}
            case ToolCallDelta():
                made = {"name": delta.name, "arguments": msgspec.json.decode(delta.arguments)}
                return {"calls": [{"id": delta.id, "function": {"index": delta.index, **made}}]}
            case ChoiceFinished():
                self._reason = "length" if delta.reason == "length" else "stop"
            case Usage():
                self._usage = delta
        return {}

    def _end(self) -> dict[str, Any]:
        """Further fields of the last object. Durations are in nanoseconds."""
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
