"""llama.cpp's server API: POST /completion, /infill, /tokenize and /detokenize, GET /props and /slots.

The tokenizer endpoints also accept vLLM's fields, and /tokenizer_info is vLLM's.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Annotated, Any

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from offspec import __version__
from offspec.core.config import SamplingParams
from offspec.core.constraint import Constraint
from offspec.server.api_errors import ApiError, llama_cpp_error
from offspec.server.delta_stream import DeltaStream
from offspec.server.endpoint import ApiRequest
from offspec.server.openai_common import Count, LlamaFields, LogitBias, TokenIds, answer_limit, llama_settings
from offspec.server.protocol import ChoiceFinished, ContentDelta, Delta, GenerateRequest, Usage
from offspec.server.reply import AnswerTimes, Event, Reply, json_response, respond
from offspec.server.service import Service
from offspec.server.structured_outputs import checked_constraint

_NEVER = -1e9  # logit bias of a forbidden token


class Body(LlamaFields, kw_only=True):
    """Common fields of both paths. n_predict: negative for no limit; 0 only computes the prompt."""

    model: str = ""
    n_predict: int | None = None
    # Object by token id, or pairs of an id and a bias; a bias of false forbids the token.
    logit_bias: LogitBias | list[tuple[Count, float | bool]] | None = None  # type: ignore[assignment]
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    stream: bool | None = None
    cache_prompt: Any = None  # ignored: prompts are cached if that leaves the answer unchanged

    def __post_init__(self) -> None:
        if isinstance(self.logit_bias, list):
            pairs = ((token, _NEVER if bias is False else float(bias)) for token, bias in self.logit_bias)
            self.logit_bias = {str(token): bias for token, bias in pairs}
        super().__post_init__()


class CompletionBody(Body, kw_only=True):
    """Body of /completion. prompt: text or token ids to continue."""

    prompt: str | Annotated[list[Count], Meta(min_length=1)]


class InfillBody(Body, kw_only=True):
    """Body of /infill. prompt: text after the prefix, at the cursor."""

    input_prefix: str = ""
    input_suffix: str = ""
    prompt: str = ""


async def completion(request: ApiRequest[CompletionBody]) -> Response:
    """Continue a prompt."""
    service, body = request.service, request.body
    return await _answer(
        service, GenerateRequest(prompt=body.prompt, raw=True, params=_params(body, service)), body
    )


async def infill(api_request: ApiRequest[InfillBody]) -> Response:
    """Generate the text between a prefix and a suffix."""
    service, body = api_request.service, api_request.body
    request = GenerateRequest(prompt=body.input_prefix + body.prompt, params=_params(body, service))
    request = request.with_suffix(body.input_suffix, service.engine.model_info, "input_suffix")
    return await _answer(service, request, body)


async def props(request: Request) -> Response:
    """Return the server's settings and properties of the model. Raises ApiError while it is loading."""
    service: Service = request.app.state.service
    info, (name, *_) = service.engine.model_info, service.names
    return json_response(
        {
            "default_generation_settings": {
                "n_ctx": service.context,
                "params": {"n_predict": -1, **llama_settings(service.defaults)},
            },
            "total_slots": service.engine.sequences,
            "model_alias": name,
            "model_path": name,
            "chat_template": info.chat_template,
            "modalities": {"vision": False, "audio": False},
            "bos_token": info.bos_token,
            "eos_token": info.eos_token,
            "build_info": f"offspec {__version__}",
            "is_sleeping": False,
        }
    )


async def slots(request: Request) -> Response:
    """Return the state of the engine's sequences. Raises ApiError while the model is loading."""
    service: Service = request.app.state.service
    busy = service.in_flight - service.queue_length
    every = (
        {"id": at, "n_ctx": service.context, "is_processing": at < busy}
        for at in range(service.engine.sequences)
    )
    return json_response([*every])


def _params(body: Body, service: Service) -> SamplingParams:
    """Return the sampling parameters of a body. Raises ApiError if one is invalid."""
    limit = answer_limit(1 if body.n_predict == 0 else body.n_predict)
    return body.sampling(service.defaults, max_tokens=limit, format=_format(body))


def _format(body: Body) -> Constraint | None:
    """Return the answer format of a body, or None for plain text. Raises ApiError if it is invalid."""
    if body.json_schema is not None:
        return checked_constraint("json_schema", "json_schema", body.json_schema)
    return checked_constraint("grammar", "grammar", body.grammar) if body.grammar else None


async def _answer(service: Service, request: GenerateRequest, body: Body) -> Response:
    answer = await service.answer(replace(request, prompt_only=body.n_predict == 0))
    return respond(answer, LlamaReply(body.stream, service.names[0], answer))


class LlamaReply(Reply):
    """Converter of an answer to /completion or /infill: objects with pieces of text, or one with all text.

    Args:
        streamed: See `Reply`.
        model: Name of the model.
        answer: The answer.
    """

    error_body = staticmethod(llama_cpp_error)

    def __init__(self, streamed: bool | None, model: str, answer: DeltaStream) -> None:
        super().__init__(streamed)
        self._model, self._request = model, answer.request
        self._times, self._end = AnswerTimes(), ChoiceFinished(0, "stop")
        self._text, self._tokens = list[str](), list[int]()
        self._usage = Usage(len(answer.ids))

    def feed(self, delta: Delta) -> Iterator[Event]:
        match delta:
            case ContentDelta(text=text, token_ids=tokens) if text or tokens:
                self._times.note()
                self._text.append(text)
                self._tokens += tokens
                part = {"index": 0, "content": text, "tokens": tokens, "stop": False, "id_slot": -1}
                predicted, evaluated = len(self._tokens), self._usage.prompt_tokens
                yield {**part, "tokens_predicted": predicted, "tokens_evaluated": evaluated}
            case ChoiceFinished():
                self._end = delta
            case Usage():
                self._usage = delta

    async def end(self) -> Iterable[Event]:
        return (self._last("", []),)

    def whole(self) -> dict[str, Any]:
        return self._last("".join(self._text), self._tokens)

    def _last(self, text: str, tokens: list[int]) -> dict[str, Any]:
        """Return the last object, with the totals of the answer."""
        request, usage, end = self._request, self._usage, self._end
        word = "eos" if end.stop is None else "word"
        return {
            "index": 0,
            "content": text,
            "tokens": tokens,
            "stop": True,
            "id_slot": -1,
            "model": self._model,
            "tokens_predicted": usage.answer_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "generation_settings": {"seed": request.params.seed, **llama_settings(request.params)},
            "prompt": request.prompt,
            "has_new_line": any("\n" in part for part in self._text),
            "truncated": False,
            "stop_type": "limit" if end.reason == "length" else word,
            "stopping_word": end.stop or "",
            "tokens_cached": usage.cached_tokens,
            "timings": self._timings(),
        }

    def _timings(self) -> dict[str, float]:
        times, usage = self._times, self._usage
        fresh, prompt, answer = usage.prompt_tokens - usage.cached_tokens, times.prompt, times.answer
        return {
            "prompt_n": fresh,
            "prompt_ms": prompt / 1e6,
            "prompt_per_second": fresh / prompt * 1e9,
            "predicted_n": usage.answer_tokens,
            "predicted_ms": answer / 1e6,
            "predicted_per_second": usage.answer_tokens / answer * 1e9,
        }


class TokenizeBody(Struct):
    """Body of /tokenize, with llama.cpp's field `content` or vLLM's field `prompt`."""

    content: str | None = None
    add_special: bool = False
    with_pieces: bool = False
    prompt: str | None = None
    add_special_tokens: bool = True
    model: str = ""


class DetokenizeBody(Struct):
    """Body of /detokenize."""

    tokens: TokenIds = []
    model: str = ""


async def tokenize(request: ApiRequest[TokenizeBody]) -> Response:
    """Return the token ids of a text, which may exceed the context."""
    service, body = request.service, request.body
    text, special = body.content, body.add_special
    if text is None:
        text, special = body.prompt, body.add_special_tokens
    if text is None:
        raise ApiError("invalid_request", "content is missing", field="content")
    ids = await service.tokenize(text, special)
    tokens: list[Any] = [_piece(service, token) for token in ids] if body.with_pieces else ids
    return json_response({"tokens": tokens, "count": len(ids), "max_model_len": service.context})


async def detokenize(request: ApiRequest[DetokenizeBody]) -> Response:
    """Return the text of token ids."""
    text = await request.service.detokenize(request.body.tokens)
    return json_response({"content": text, "prompt": text})


async def tokenizer_info(request: Request) -> Response:
    """Return the tokenizer's configuration. Raises ApiError while the model is loading."""
    service: Service = request.app.state.service
    info = service.engine.model_info
    return json_response(
        {
            "bos_token": info.bos_token or None,
            "eos_token": info.eos_token or None,
            "chat_template": info.chat_template or None,
            "model_max_length": service.context,
        }
    )


def _piece(service: Service, token: int) -> dict[str, Any]:
    """Return a token id with its text, or with its bytes if they are not valid UTF-8 on their own."""
    utf8 = service.engine.token_bytes(token)
    try:
        return {"id": token, "piece": utf8.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(utf8)}
