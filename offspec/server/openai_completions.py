"""OpenAI's Completions API, which continues text without a chat template: POST /v1/completions."""

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

_DEFAULT_TOKENS = 16  # OpenAI's default for max_tokens
_MOST_PROMPTS = 128


class Body(ChunkedBody, kw_only=True):
    """Body of a request. prompt: text, token ids, or a list of texts or of lists of token ids."""

    prompt: str | Annotated[list[str | Count | list[Count]], Meta(min_length=1)]
    max_tokens: Limit | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    structured_outputs: StructuredOutputs | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None  # accepted only if it equals `n`


async def create(api_request: ApiRequest[Body]) -> Response:
    """Continue one or several prompts."""
    service, body = api_request.service, api_request.body
    requests = list(_generate_requests(body, service))
    if len(requests) > 1:  # errors in any prompt are reported before the first is answered
        for request in requests:
            await service.encode(request)
    first = await service.answer(requests[0])
    return respond(_merge_answers(service, first, requests), CompletionReply(body, len(requests)))


def _generate_requests(body: Body, service: Service) -> Iterator[GenerateRequest]:
    """Yield the generation requests of a body, one per prompt. Raises ApiError for unsupported fields."""
    for request in to_requests(body, service.defaults):
        yield request.with_suffix(body.suffix, service.engine.model_info) if body.suffix else request


def to_requests(body: Body, defaults: SamplingParams) -> list[GenerateRequest]:
    """Convert a body to generation requests without its suffix, one per prompt. Raises ApiError."""
    refuse(body, {"best_of": body.choices})
    params = body.sampling(
        defaults,
        max_tokens=_DEFAULT_TOKENS if body.max_tokens is None else answer_limit(body.max_tokens or 1),
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


def _prompts(prompt: str | list[Any]) -> Sequence[str | list[int]]:
    """Return a list of prompts, each text or token ids. Raises ApiError if a list mixes types."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(each) for each in prompt}
    if kinds == {int}:
        return [prompt]
    if [] in prompt or kinds not in ({str}, {list}) or len(prompt) > _MOST_PROMPTS:
        raise invalid("prompt", f"it must be text, token ids, or a list of at most {_MOST_PROMPTS} of either")
    return prompt


@asynccontextmanager
async def _merge_answers(
    service: Service, first: DeltaStream, requests: Sequence[GenerateRequest]
) -> AsyncIterator[AsyncIterable[Delta]]:
    """Merge the deltas of all answers in order of arrival. Choices are numbered across all prompts.

    first: answer to the first request.
    """
    queue = asyncio.Queue[Delta | Exception | None](1)
    async with first:
        reading = asyncio.create_task(_read_all(service, first, requests, queue))
        try:
            yield _deltas(queue)
        finally:
            reading.cancel()
            await asyncio.wait((reading,))


async def _deltas(queue: asyncio.Queue[Delta | Exception | None]) -> AsyncIterator[Delta]:
    while (item := await queue.get()) is not None:
        if isinstance(item, Exception):
            raise item
        yield item


async def _read_all(
    service: Service,
    first: DeltaStream,
    requests: Sequence[GenerateRequest],
    queue: asyncio.Queue[Delta | Exception | None],
) -> None:
    """Put the deltas of all answers into a queue, and then None or the first error.

    Only one prompt is queued at a time, so that a list of prompts does not delay all other requests.
    """

    async def read(at: int, answer: DeltaStream) -> None:
        async with answer:
            async for delta in answer:
                if isinstance(delta, ContentDelta | ChoiceFinished):
                    delta = replace(delta, choice=at * answer.request.choices + delta.choice)
                await queue.put(delta)

    answer = first
    try:
        async with asyncio.TaskGroup() as group:
            for at, request in enumerate(requests):
                answer = await service.answer(request, admitted=True) if at else first
                group.create_task(read(at, answer))
                await answer.started.wait()
    except ExceptionGroup as errors:
        await queue.put(errors.exceptions[0])
    else:
        await queue.put(None)


class CompletionReply(ChunkedReply):
    """Converter of an answer to the Completions API.

    Args:
        body: Body of the request.
        prompts: Number of prompts in the body.
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
                    choice.parts.append(delta)
                yield self.chunk(_body(delta.choice, delta.text, None, logprobs))
            case ChoiceFinished():
                self._choices[delta.choice].reason = delta.reason
                yield self.chunk(_body(delta.choice, "", delta.reason, None))
            case Usage():
                self.usage += delta

    def choice_bodies(self) -> Iterator[dict[str, Any]]:
        for index, choice in enumerate(self._choices):
            tokens = [token for part in choice.parts for token in part.logprobs]
            logprobs = _Choice().logprobs(tokens) if self._with_logprobs else None
            yield _body(index, "".join(part.text for part in choice.parts), choice.reason, logprobs)


class _Choice:
    """Contents of a choice so far."""

    def __init__(self) -> None:
        self.parts, self.reason = list[ContentDelta](), "stop"
        self._length = 0  # number of characters of the tokens so far

    def logprobs(self, tokens: Sequence[TokenChoice]) -> dict[str, Any]:
        """Return the next tokens with their log-probabilities and text offsets, in characters."""
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
    """Return log-probabilities by text; of two tokens with the same text, the more likely one counts."""
    logprobs = dict[str, float | None]()
    for each in (*token.top, token):
        logprobs.setdefault(each.text, each.logprob)
    return logprobs
