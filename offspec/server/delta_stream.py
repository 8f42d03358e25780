"""Answer to one request: the engine computes its choices, and the client reads their deltas."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from offspec.chat.answer_parser import AnswerParser, PlainTextParser, SingleCallParser
from offspec.core.errors import OffspecError
from offspec.core.events import (
    Event,
    Finished,
    PassStats,
    PromptLogprobs,
    Result,
    TextDelta,
)
from offspec.server.api_errors import ApiError, api_error_from, internal
from offspec.server.metrics import Metrics
from offspec.server.output_parser import OutputParser, TokenFormatter
from offspec.server.protocol import ChoiceFinished, ContentDelta, Delta, EngineEvent, GenerateRequest, Usage

if TYPE_CHECKING:
    from offspec.engine.engine import Engine

log = logging.getLogger("offspec.server")

_MOST_UNREAD = 4096  # maximum number of unread deltas, at which the answer is aborted
_SEEDS = 2**64


class DeltaStream:
    """Asynchronous iterator over the deltas of an answer, and context manager that abandons it on exit.

    An abandoned answer is halted when its prompt is computed, so that a retry finds the prompt in the cache.
    `on_leave` may halt it earlier. Iteration raises ApiError if the answer fails. Create the stream in a
    thread, because the search for marks in a long prompt takes time.

    started: set when the answer leaves the queue.

    Args:
        request: Request with a seed; each choice uses the next seed.
        ids: Token ids of the prompt.
        engine: Engine that computes the choices.
        metrics: Counters of passes and answers.
        on_leave: Called when the client has read the answer or disconnected.
    """

    def __init__(
        self,
        request: GenerateRequest,
        ids: list[int],
        engine: "Engine",
        metrics: Metrics,
        on_leave: Callable[["DeltaStream"], None],
    ) -> None:
        self.request, self.ids = request, ids
        self._engine, self._metrics, self._on_leave = engine, metrics, on_leave
        self.halt, self.started = threading.Event(), asyncio.Event()
        self.abandoned = self.prompt_computed = False
        self._tokens = TokenFormatter(engine.token_bytes)
        self._parser: AnswerParser = PlainTextParser()  # initial state; several choices get copies of it
        if not request.raw:
            parser = engine.parts(ids, () if request.one_call else request.tools.allowed_functions)
            self._parser = SingleCallParser(parser) if request.one_call else parser
        self._prompt = ""  # text of the prompt, if the answer echoes it
        if request.echo:
            self._prompt = (
                request.prompt if isinstance(request.prompt, str) else engine.decode_with_special(ids)
            )
        self._choices, self._failed = 0, False  # number of choices that were started
        self._helper: asyncio.Task[None] | None = None  # task that waits for another slot
        self._results = dict[int, tuple[Result, int]]()  # result and reasoning tokens by choice
        self._arrived = asyncio.Event()
        self._unread = deque[Delta | ApiError | None]()  # None: the end

    async def run(self, slots: asyncio.Semaphore) -> None:
        """Wait for a free slot and compute all choices in it, one after the other.

        While choices are left, a helper task waits for another slot to compute one of them concurrently.

        slots: semaphore with one slot per sequence of the engine.
        """
        async with asyncio.TaskGroup() as tasks:
            async with slots:
                self.started.set()
                while self._left:
                    await self._compute_next(slots, tasks)
            if self._helper is not None:
                self._helper.cancel()
        if not self._failed:
            if not self.halt.is_set():
                self.put(self._usage())
            self.put(None)

    @property
    def _left(self) -> bool:
        """Whether another choice must be started."""
        return self._choices < self.request.choices and not self.halt.is_set()

    async def _help(self, slots: asyncio.Semaphore, tasks: asyncio.TaskGroup) -> None:
        async with slots:
            self._helper = None
            if self._left:
                await self._compute_next(slots, tasks)

    async def _compute_next(self, slots: asyncio.Semaphore, tasks: asyncio.TaskGroup) -> None:
        """Compute one choice, from its first delta to its last. If it fails, the others are halted."""
        choice = self._choices
        self._choices += 1
        if self._left and self._helper is None:
            self._helper = tasks.create_task(self._help(slots, tasks))
        try:
            await self._compute(choice)
        except Exception as error:
            self._fail(error)

    async def _compute(self, choice: int) -> None:
        request, params = self.request, self.request.params
        parts = self._parser if request.choices == 1 else deepcopy(self._parser)
        parser = OutputParser(choice, parts, self._tokens, not request.parallel_calls)
        assert params.seed is not None
        params = replace(params, seed=(params.seed + choice) % _SEEDS)
        if request.echo and params.prompt_logprobs is None:
            self.put(ContentDelta(choice, self._prompt))
        result: Result | None = None
        options: Any = {"halt": self.halt, "trees": request.trees, "progress": request.trees}
        async for event in self._engine.submit(self.ids, params, shown=parser.shown, **options):
            self._observe(event)
            match event:
                case PromptLogprobs(logprobs=scored) if request.echo:
                    self.put(
                        ContentDelta(choice, self._prompt, (), self._tokens.describe_prompt(self.ids, scored))
                    )
                case TextDelta() if not request.prompt_only:
                    self.put(*parser.feed(event))
                case PassStats():
                    self._metrics.record_pass(event)
                case Finished(result=result):
                    self._metrics.record_answer(result)
        assert result is not None
        if request.prompt_only:
            self.put(ChoiceFinished(choice, "length"))
            result = replace(result, token_ids=())
        elif result.finish_reason != "halted":
            stop = self._stop_text(result) if result.finish_reason == "stop" else None
            self.put(*parser.finish(result, stop))
        self._results[choice] = result, parser.reasoning_tokens

    def _observe(self, event: Event) -> None:
        """Forward an engine event if the request wants it, and halt an abandoned answer after a pass."""
        if self.request.trees and isinstance(event, EngineEvent):
            self.put(event)
        if isinstance(event, PassStats):
            self.prompt_computed = True
            if self.abandoned:
                self.halt.set()

    def _stop_text(self, result: Result) -> str | None:
        """Return the stop string that ended an answer: the one that is complete first in its tokens' text."""
        text, stops = self._engine.decode_with_special(result.token_ids), self.request.params.stop
        matches = [(at + len(stop), -len(stop), stop) for stop in stops if (at := text.find(stop)) >= 0]
        return min(matches)[2] if matches else None

    def _fail(self, error: Exception) -> None:
        """Report the first error and halt the other choices."""
        if self._failed:
            return
        self._failed = True
        api_error = api_error_from(error) if isinstance(error, OffspecError) else internal()
        if not isinstance(error, OffspecError):  # a bug: log the traceback and keep serving
            log.error("a request failed", exc_info=error)
        elif api_error.status >= 500:
            log.error("%s", error)
        if api_error.status >= 500:
            self._metrics.record_error(type(error).__name__)
        self.abort(api_error)

    def _usage(self) -> Usage:
        results = [self._results[choice] for choice in sorted(self._results)]
        return Usage(
            prompt_tokens=len(self.ids),
            cached_tokens=results[0][0].reused_tokens,
            answer_tokens=sum(result.tokens for result, _ in results),
            reasoning_tokens=sum(reasoning for _, reasoning in results),
        )

    def put(self, *items: Delta | ApiError | None) -> None:
        """Queue deltas for the client, the error that ends the answer, or None for its end."""
        for item in items:
            if len(self._unread) >= _MOST_UNREAD and not self.halt.is_set():
                self.halt.set()
                item = ApiError("timeout", "the answer was aborted: the client read it too slowly")
            self._unread.append(item)
        self._arrived.set()

    def abort(self, error: ApiError) -> None:
        """End the answer with an error."""
        self.put(error)
        self.halt.set()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while True:
            while self._unread:
                item = self._unread.popleft()
                if item is None:
                    return
                if isinstance(item, ApiError):
                    raise item
                yield item
            self._arrived.clear()
            await self._arrived.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.abandoned = True
        self._on_leave(self)
