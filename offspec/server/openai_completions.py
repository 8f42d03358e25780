"""OpenAI's Completions, which continue text as it is: POST /v1/completions."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Annotated, Any

from msgspec import Meta
from starlette.responses import Response

from offspec.core.config import SamplingParams
from offspec.server.api_errors import invalid, refuse
from offspec.server.delta_stream import DeltaStream
from offspec.server.endpoint import ApiRequest
from offspec.server.openai_common import ChunkedBody, ChunkedReply, Count, Limit, answer_limit
from offspec.server.protocol import ChoiceFinished, ContentDelta, Delta, GenerateRequest, TokenChoice, Usage
from offspec.server.reply import Event, respond
from offspec.server.service import Service
from offspec.server.structured_outputs import StructuredOutputs, format_of

_LONGEST = 16  # tokens of an answer that gives no number, as OpenAI has it
_MOST_PROMPTS = 128


class Body(ChunkedBody, kw_only=True):
    """A request. prompt: a text, token ids, or a list of one of the two."""

    prompt: str | Annotated[list[str | Count | list[Count]], Meta(min_length=1)]
    max_tokens: Limit | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    structured_outputs: StructuredOutputs | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None  # accepted only with the value that changes nothing


async def create(request: ApiRequest[Body]) -> Response:
    """A continuation of one or several prompts."""
    service, body = request.service, request.body
    asks = list(_asks(body, service))
    if len(asks) > 1:  # errors in any prompt are reported before the first is answered
        for ask in asks:
            await service.encode(ask)
    first = await service.answer(asks[0])
    return respond(_merged(service, first, asks), CompletionReply(body, len(asks)))


def _asks(body: Body, service: Service) -> Iterator[GenerateRequest]:
    """The requests of a body, one for each prompt. Raises ApiError."""
    for ask in to_requests(body, service.defaults):
        yield ask.with_suffix(body.suffix, service.engine.model_info) if body.suffix else ask


def to_requests(body: Body, defaults: SamplingParams) -> list[GenerateRequest]:
    """The requests of a body without its suffix, one for each prompt. Raises ApiError."""
    refuse(body, {"best_of": body.choices})
    params = body.sampling(
        defaults,
        max_tokens=_LONGEST if body.max_tokens is None else answer_limit(body.max_tokens or 1),
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
        format=format_of(None, body.structured_outputs),
    )
    return [
        GenerateRequest(
            prompt=prompt,
            raw=True,
            echo=bool(body.echo),
            params=params,
            choices=body.choices,
            prompt_only=body.max_tokens == 0,
        )
        for prompt in _prompts(body.prompt)
    ]


def _prompts(given: str | list[Any]) -> Sequence[str | list[int]]:
    """The prompts, each a text or ids. Raises ApiError for a list of unlike things."""
    if isinstance(given, str):
        return [given]
    kinds = {type(each) for each in given}
    if kinds == {int}:
        return [given]
    if kinds not in ({str}, {list}) or len(given) > _MOST_PROMPTS:
        raise invalid("prompt", f"a text, token ids, or a list of at most {_MOST_PROMPTS} of one of the two")
    return given


@asynccontextmanager
async def _merged(
    service: Service, first: DeltaStream, asks: Sequence[GenerateRequest]
) -> AsyncIterator[AsyncIterable[Delta]]:
    """The deltas of all answers as they come. Choices are numbered through all prompts."""
    found = asyncio.Queue[Delta | Exception | None](1)
    async with first:
        reading = asyncio.create_task(_read_all(service, first, asks, found))
        try:
            yield _deltas(found)
        finally:
            reading.cancel()
            await asyncio.wait((reading,))


async def _deltas(found: asyncio.Queue[Delta | Exception | None]) -> AsyncIterator[Delta]:
    while (item := await found.get()) is not None:
        if isinstance(item, Exception):
            raise item
        yield item


async def _read_all(
    service: Service,
    first: DeltaStream,
    asks: Sequence[GenerateRequest],
    found: asyncio.Queue[Delta | Exception | None],
) -> None:
    """Put the deltas of all answers, then their end or the first fault. One prompt waits for its turn at a
    time, so that a list of them is not before everybody else."""

    async def read(at: int, answer: DeltaStream) -> None:
        async with answer:
            async for delta in answer:
                if isinstance(delta, ContentDelta | ChoiceFinished):
                    delta = replace(delta, choice=at * answer.ask.choices + delta.choice)
                await found.put(delta)

    answer = first
    try:
        async with asyncio.TaskGroup() as group:
            for at, ask in enumerate(asks):
                answer = await service.answer(ask, admitted=True) if at else first
                group.create_task(read(at, answer))
                await answer.started.wait()
    except ExceptionGroup as errors:
        await found.put(errors.exceptions[0])
    else:
        await found.put(None)


class CompletionReply(ChunkedReply):
    """An answer of Completions.

    Args:
        body: The request.
        prompts: Number of its prompts.
    """

    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, body: Body, prompts: int) -> None:
        super().__init__(body)
        self._with_logprobs = body.logprobs is not None
        self._choices = [_Choice() for _ in range(prompts * body.choices)]

    def feed(self, delta: Delta) -> Iterator[Event]:
        match delta:
            case ContentDelta() if delta.text or delta.logprobs:
                choice = self._choices[delta.choice]
                logprobs = choice.logprobs(delta.logprobs) if self._with_logprobs else None
                if not self.streamed:
                    choice.said.append(delta)
                yield self.chunk(_body(delta.choice, delta.text, None, logprobs))
            case ChoiceFinished():
                self._choices[delta.choice].reason = delta.reason
                yield self.chunk(_body(delta.choice, "", delta.reason, None))
            case Usage():
                self.usage += delta

    def choice_bodies(self) -> Iterator[dict[str, Any]]:
        for index, choice in enumerate(self._choices):
            tokens = [token for part in choice.said for token in part.logprobs]
            logprobs = _Choice().logprobs(tokens) if self._with_logprobs else None
            yield _body(index, "".join(part.text for part in choice.said), choice.reason, logprobs)


class _Choice:
    """Choice under construction."""

    def __init__(self) -> None:
        self.said, self.reason = list[ContentDelta](), "stop"
        self._length = 0  # characters of the tokens so far

    def logprobs(self, tokens: Sequence[TokenChoice]) -> dict[str, Any]:
        """The next tokens with their log-probabilities, and the number of characters before each."""
        lengths = accumulate((len(token.text) for token in tokens), initial=self._length)
        *offsets, self._length = lengths
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [None if token.logprob is None else _top(token) for token in tokens],
            "text_offset": offsets,
        }


def _body(index: int, text: str, reason: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _top(token: TokenChoice) -> dict[str, float | None]:
    """The likeliest texts; of two tokens that are spelt alike, the likelier."""
    found = dict[str, float | None]()
    for each in (*token.top, token):
        found.setdefault(each.text, each.logprob)
    return found
