"""Sampling fields, log-probabilities and chunks, shared by the APIs."""

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

_DONE = msgspec.Raw(b"[DONE]")  # last event of a stream
UNLIMITED = 2**31 - 1  # maximum tokens of an answer that only the context limits
Count = Annotated[int, Meta(ge=0, le=UNLIMITED)]
Limit = Annotated[int, Meta(ge=-2, le=UNLIMITED)]  # maximum tokens of an answer; see `answer_limit`
# These lengths are limited because checking a longer value would block other requests.
MAX_MESSAGES = 2**16
TokenIds = Annotated[list[Count], Meta(max_length=2**18)]
LogitBias = Annotated[dict[Annotated[str, Meta(pattern=r"^\d{1,10}$")], float], Meta(max_length=2**16)]
Text = Annotated[str, Meta(min_length=1)]
Texts = Annotated[list[Text], Meta(max_length=256)]  # limited because each is searched for at every token


class StreamOptions(msgspec.Struct):
    """Options of a stream. include_usage: whether the last chunk has token counts."""

    include_usage: bool = False


class SamplingFields(msgspec.Struct, kw_only=True):
    """Sampling fields of a body, named as in `SamplingParams`. None: the server's default.

    They are OpenAI's fields and additional fields of vLLM and others.
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
        """Return sampling parameters from the fields. Raises ApiError if one is invalid.

        Args:
            defaults: Values of parameters that the body does not set.
            others: Parameters that are not fields of this class.
        """
        names = SamplingFields.__struct_fields__
        values = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.top_k == -1:  # vLLM's value for all tokens
            values["top_k"] = 0
        if self.seed is not None:
            values["seed"] = self.seed % 2**64
        if self.logit_bias is not None:
            values["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        try:
            return replace(defaults, **values, **others)
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
    """Return sampling values under the names of llama.cpp and Ollama."""
    names = {"repetition_penalty": "repeat_penalty"}
    return {names.get(name, name): value for name, value in sampling_values(params).items()}


def answer_limit(*limits: int | None) -> int:
    """Return the maximum tokens of an answer: the first positive limit, or `UNLIMITED`."""
    return next((limit for limit in limits if limit is not None and limit > 0), UNLIMITED)


def template_variables(
    kwargs: Mapping[str, Any] | None, effort: str | None, thinks: bool | None = None
) -> dict[str, Any]:
    """Return variables of the chat template.

    Args:
        kwargs: `chat_template_kwargs`, which take precedence over the other arguments.
        effort: Reasoning effort; "none" also disables reasoning.
        thinks: Whether to enable reasoning. None: the template's default.
    """
    variables = dict(kwargs or {})
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
    if effort == "none" or thinks is not None:
        variables.setdefault("enable_thinking", effort != "none" and thinks is not False)
    return variables


def logprob_body(token: TokenChoice) -> dict[str, Any]:
    """Return a token with its log-probability, and the most likely tokens at its position."""
    return {**_token_body(token), "top_logprobs": [_token_body(each) for each in token.top]}


def usage_body(usage: Usage, **input_details: int) -> dict[str, Any]:
    """Return token counts in the format of Responses and Batches. input_details: additional details."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, **input_details},
        "output_tokens": usage.answer_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.answer_tokens,
    }


def _token_body(token: TokenChoice) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.utf8)}


class ChunkedBody(SamplingFields, kw_only=True):
    """Common fields of Chat Completions and Completions."""

    model: str = ""
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def choices(self) -> int:
        """Number of choices per prompt."""
        return self.n or 1


class ChunkedReply(Reply):
    """Converter of an answer to Chat Completions or Completions: chunks of its choices, or all choices.

    body: body of the request.
    """

    kind: ClassVar[str]  # type of the whole object
    chunk_kind: ClassVar[str]  # type of an object in a stream
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
        """Return all complete choices."""

    def chunk(self, *choices: dict[str, Any], **more: Any) -> Event:
        """Return a chunk of the stream. choices: parts of choices. more: further fields."""
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
