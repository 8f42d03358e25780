"""Shared by OpenAI's and other APIs: fields that choose tokens, log-probabilities, chunks."""

import secrets
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from offspec.core.config import SamplingParams
from offspec.core.errors import RequestError
from offspec.core.sampling_defaults import sampling_values
from offspec.server.api_errors import api_error_from, openai_error
from offspec.server.protocol import TokenChoice, Usage
from offspec.server.reply import Event, Reply

_DONE = msgspec.Raw(b"[DONE]")  # the last event of a stream
UNLIMITED = 2**31 - 1  # tokens of an answer: limited only by the context
Count = Annotated[int, Meta(ge=0, le=UNLIMITED)]
Limit = Annotated[int, Meta(ge=-2, le=UNLIMITED)]  # of an answer; see `answer_limit`
# Longer values would block other requests while they are checked.
MAX_MESSAGES = 2**16
TokenIds = Annotated[list[Count], Meta(max_length=2**18)]
LogitBias = Annotated[dict[Annotated[str, Meta(pattern=r"^\d{1,10}$")], float], Meta(max_length=2**16)]
Text = Annotated[str, Meta(min_length=1)]
Texts = Annotated[list[Text], Meta(max_length=256)]  # each is looked for at every token


class StreamOptions(msgspec.Struct):
    """Additional contents of a stream."""

    include_usage: bool = False


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields of a body that choose tokens, under the names of `SamplingParams`; None: the server's default.

    OpenAI's fields, and those that vLLM and others take in addition.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Meta(ge=-1, le=UNLIMITED)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: Text | Texts | None = None
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = None
    min_tokens: Count | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Texts | None = None
    no_repeat_ngram_size: Count | None = None

    def sampling(self, defaults: SamplingParams, **others: Any) -> SamplingParams:
        """Return the parameters that the fields set. others: further parameters. Raises ApiError."""
        names = SamplingFields.__struct_fields__
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.top_k == -1:  # as vLLM says "all"
            given["top_k"] = 0
        if self.seed is not None:
            given["seed"] = self.seed % 2**64
        if self.logit_bias is not None:
            given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        try:
            return replace(defaults, **given, **others)
        except RequestError as error:
            raise api_error_from(error) from None


class LlamaFields(SamplingFields, kw_only=True):
    """Sampling fields with the additional names and values of llama.cpp and Ollama."""

    repeat_penalty: float | None = None

    def __post_init__(self) -> None:
        if self.repetition_penalty is None:
            self.repetition_penalty = self.repeat_penalty
        if self.seed == -1:  # a new seed for each answer
            self.seed = None


def llama_settings(params: SamplingParams) -> dict[str, float]:
    """Sampling values under the names that llama.cpp and Ollama have for them."""
    names = {"repetition_penalty": "repeat_penalty"}
    return {names.get(name, name): value for name, value in sampling_values(params).items()}


def answer_limit(*given: int | None) -> int:
    """Return the maximum tokens of an answer: the first given limit. 0 and -1 mean no limit."""
    return next((limit for limit in given if limit is not None and limit > 0), UNLIMITED)


def template_variables(
    given: Mapping[str, Any] | None, effort: str | None, thinks: bool | None = None
) -> dict[str, Any]:
    """Variables of the chat template.

    Args:
        given: `chat_template_kwargs`, which take precedence over other fields.
        effort: How much to reason; "none" also switches thinking off.
        thinks: Whether to think. None: as the template has it.
    """
    variables = dict(given or {})
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
    if effort == "none" or thinks is not None:
        variables.setdefault("enable_thinking", effort != "none" and thinks is not False)
    return variables


def logprob_body(token: TokenChoice) -> dict[str, Any]:
    """A token of an answer with its log-probability, and the likeliest ones there."""
    return {**_likely(token), "top_logprobs": [_likely(each) for each in token.top]}


def usage_body(usage: Usage, **input_details: int) -> dict[str, Any]:
    """Counts of tokens, as Responses and Batches have them."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, **input_details},
        "output_tokens": usage.answer_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.answer_tokens,
    }


def _likely(token: TokenChoice) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.utf8)}


class ChunkedBody(SamplingFields, kw_only=True):
    """Fields of both APIs."""

    model: str = ""
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def choices(self) -> int:
        """Number of choices of each prompt."""
        return self.n or 1


class ChunkedReply(Reply):
    """An answer of one of the APIs: chunks of its choices, or all choices. body: the request."""

    kind: ClassVar[str]  # of the object
    chunk_kind: ClassVar[str]  # of an object in a stream
    id_prefix: ClassVar[str]
    error_body = staticmethod(openai_error)

    def __init__(self, body: ChunkedBody) -> None:
        super().__init__(body.stream)
        self._model = body.model
        self._head = self._header(self.chunk_kind)
        self._with_usage = body.stream_options is not None and body.stream_options.include_usage
        self.usage = Usage()

    @abstractmethod
    def choice_bodies(self) -> Iterable[dict[str, Any]]:
        """Return all choices, whole."""

    def chunk(self, *choices: dict[str, Any], **more: Any) -> Event:
        """Return a chunk with parts of choices."""
        usage = {"usage": None} if self._with_usage else {}
        return {**self._head, "choices": choices, **usage, **more}

    async def end(self) -> Iterable[Event]:
        return (self.chunk(usage=_chunked_usage(self.usage)), _DONE) if self._with_usage else (_DONE,)

    def whole(self) -> dict[str, Any]:
        choices, usage = [*self.choice_bodies()], _chunked_usage(self.usage)
        return {**self._header(self.kind), "choices": choices, "usage": usage}

    def _header(self, kind: str) -> dict[str, Any]:
        id = f"{self.id_prefix}-{secrets.token_hex(16)}"
        return {"id": id, "object": kind, "created": int(time.time()), "model": self._model}


def _chunked_usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.answer_tokens,
        "total_tokens": usage.prompt_tokens + usage.answer_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }
