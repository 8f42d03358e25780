"""OpenAI's Completions, which continue text as it is: POST /v1/completions."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Annotated, Any

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from offspec.server.delta_stream import DeltaStream
from offspec.server.exchange import Ask, Delta, Ended, Said, TokenChoice, Usage
from offspec.server.faults import Fault, refuse
from offspec.server.formats import StructuredOutputs, format_of
from offspec.server.infill import with_suffix
from offspec.server.openai_common import (
    DONE,
    ChoosingTokens,
    Count,
    Limit,
    StreamOptions,
    answer_limit,
    error_body,
    header,
    usage_body,
)
from offspec.server.reading import read_body
from offspec.server.responses import EventStream, WholeAnswer, event
from offspec.server.service import Service

_LONGEST = 16  # tokens of an answer that gives no number, as OpenAI has it
_MOST_PROMPTS = 128


class Body(ChoosingTokens, kw_only=True):
    """A request. prompt: a text, token ids, or a list of one of the two."""

    model: str = ""
    prompt: str | Annotated[list[str | Count | list[Count]], Meta(min_length=1)]
    max_tokens: Limit | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    structured_outputs: StructuredOutputs | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None  # accepted only with the value that changes nothing

    @property
    def choices(self) -> int:
        """Of each prompt."""
        return self.n or 1


async def create(request: Request) -> Response:
    """A continuation of one or several prompts."""
    service: Service = request.app.state.service
    body = await read_body(request, Body)
    body.model = service.check_name(body.model)
    asks = list(_asks(body, service))
    if len(asks) > 1:  # what is wrong with the last of them is told before the first is answered
        for ask in asks:
            await service.encode(ask)
    first = await service.answer(asks[0])
    items = _items(service, first, asks)
    if body.stream:
        return EventStream(first, _events(items, body), lambda fault: event(error_body(fault)))
    return WholeAnswer(first, _completion(items, body, len(asks)), error_body)


def _asks(body: Body, service: Service) -> Iterator[Ask]:
    """What a body asks for, a request for each prompt. Raises Fault."""
    refuse({"best_of": body.best_of}, {"best_of": body.choices})
    params = body.sampling(
        service.defaults,
        max_tokens=_LONGEST if body.max_tokens is None else answer_limit(body.max_tokens or 1),
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
        format=format_of(None, body.structured_outputs),
    )
    for prompt in _prompts(body.prompt):
        ask = Ask(
            prompt=prompt,
            raw=True,
            echo=bool(body.echo),
            params=params,
            choices=body.choices,
            silent=body.max_tokens == 0,
        )
        yield with_suffix(ask, body.suffix, service) if body.suffix else ask


def _prompts(given: str | list[Any]) -> Sequence[str | list[int]]:
    """The prompts, each a text or ids. Raises Fault for a list of unlike things."""
    if isinstance(given, str):
        return [given]
    kinds = {type(each) for each in given}
    if kinds == {int}:
        return [given]
    if kinds not in ({str}, {list}) or len(given) > _MOST_PROMPTS:
        message = f"prompt: a text, token ids, or a list of at most {_MOST_PROMPTS} of one of the two"
        raise Fault("invalid_request", message, field="prompt")
    return given


async def _items(
    service: Service, first: DeltaStream, asks: Sequence[Ask]
) -> AsyncGenerator[tuple[int, Delta], None]:
    """The events of all answers as they come, each with the number of its prompt."""
    found = asyncio.Queue[tuple[int, Delta] | Exception | None](1)
    reading = asyncio.create_task(_read_all(service, first, asks, found))
    try:
        while (item := await found.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        reading.cancel()
        await asyncio.wait((reading,))


async def _read_all(
    service: Service,
    first: DeltaStream,
    asks: Sequence[Ask],
    found: asyncio.Queue[tuple[int, Delta] | Exception | None],
) -> None:
    """Put the events of all answers, then their end or the first fault. One prompt waits for its turn at a
    time, so that a list of them is not before everybody else."""

    async def read(at: int, answer: DeltaStream) -> None:
        async with answer:
            async for item in answer:
                await found.put((at, item))

    answer = first
    try:
        async with asyncio.TaskGroup() as group:
            for at, ask in enumerate(asks):
                answer = await service.answer(ask, admitted=True) if at else first
                group.create_task(read(at, answer))
                await answer.begun.wait()
    except ExceptionGroup as errors:
        await found.put(errors.exceptions[0])
    else:
        await found.put(None)


async def _events(items: AsyncGenerator[tuple[int, Delta], None], body: Body) -> AsyncGenerator[bytes, None]:
    """The chunks of a streamed answer."""
    head = header("text_completion", "cmpl", body.model)
    with_usage = body.stream_options is not None and body.stream_options.include_usage
    extra = {"usage": None} if with_usage else {}
    counts, tokens = list[Usage](), _Tokens()
    async with aclosing(items):
        async for at, item in items:
            match item:
                case Said() if item.text or item.logprobs:
                    index = at * body.choices + item.choice
                    logprobs = tokens.body(index, item) if body.logprobs is not None else None
                    found = _choice(index, item.text, None, logprobs)
                case Ended():
                    found = _choice(at * body.choices + item.choice, "", item.reason, None)
                case Usage():
                    counts.append(item)
                    continue
                case _:
                    continue
            yield event({**head, "choices": [found], **extra})
    if with_usage:
        yield event({**head, "choices": [], "usage": usage_body(*counts)})
    yield DONE


def _choice(index: int, text: str, reason: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


async def _completion(
    items: AsyncGenerator[tuple[int, Delta], None], body: Body, prompts: int
) -> dict[str, Any]:
    """A whole answer."""
    count = prompts * body.choices
    said = [list[Said]() for _ in range(count)]
    reasons, counts = ["stop"] * count, list[Usage]()
    async with aclosing(items):
        async for at, item in items:
            match item:
                case Said():
                    said[at * body.choices + item.choice].append(item)
                case Ended():
                    reasons[at * body.choices + item.choice] = item.reason
                case Usage():
                    counts.append(item)
    choices = []
    for index, parts in enumerate(said):
        text = "".join(part.text for part in parts)
        tokens = tuple(token for part in parts for token in part.logprobs)
        logprobs = _Tokens().body(0, Said(0, text, (), tokens)) if body.logprobs is not None else None
        choices.append(_choice(index, text, reasons[index], logprobs))
    return {
        **header("text_completion", "cmpl", body.model),
        "choices": choices,
        "usage": usage_body(*counts),
    }


class _Tokens:
    """Log-probabilities in the shape of this API, which counts the characters before each token."""

    def __init__(self) -> None:
        self._before = dict[int, int]()

    def body(self, choice: int, said: Said) -> dict[str, Any]:
        """Of the tokens that a part of a choice came with."""
        offsets, offset = list[int](), self._before.get(choice, 0)
        for token in said.logprobs:
            offsets.append(offset)
            offset += len(token.chosen.text)
        self._before[choice] = offset
        return {
            "tokens": [token.chosen.text for token in said.logprobs],
            "token_logprobs": [token.chosen.logprob for token in said.logprobs],
            "top_logprobs": [
                None if token.chosen.logprob is None else _top(token) for token in said.logprobs
            ],
            "text_offset": offsets,
        }


def _top(token: TokenChoice) -> dict[str, float | None]:
    """The likeliest texts; of two tokens that are spelt alike, the likelier."""
    found = dict[str, float | None]()
    for each in (*token.top, token.chosen):
        found.setdefault(each.text, each.logprob)
    return found
