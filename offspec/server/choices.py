"""The choices of one request, each the engine's answer to the same prompt with the next seed."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from offspec.core.errors import OffspecError
from offspec.core.events import Finished, PassStats, PromptLogprobs, Result, TextDelta, TokenLogprobs
from offspec.server.delta_stream import DeltaStream
from offspec.server.exchange import Ended, LikelyToken, Said, TokenChoice, Usage
from offspec.server.faults import internal, of_error
from offspec.server.metrics import Metrics
from offspec.server.parting import Parting, parts_of, reason_of, stop_of
from offspec.server.served_engine import ServedEngine

log = logging.getLogger("offspec.server")

_SEEDS = 2**64
_LEAST = -9999.0  # JSON knows no infinity


class Choices:
    """Computes the choices of one answer.

    Args:
        engine: Computes them.
        answer: Takes the deltas of all choices, and their end.
        slots: One for each sequence of the engine.
        metrics: Counts passes and answers.
    """

    def __init__(
        self, engine: ServedEngine, answer: DeltaStream, slots: asyncio.Semaphore, metrics: Metrics
    ) -> None:
        self.answer = answer
        self._engine, self._slots, self._metrics = engine, slots, metrics
        self._begun, self._failed = 0, False
        self._helper: asyncio.Task[None] | None = None  # that waits for a slot
        self._results = dict[int, tuple[Result, int]]()  # and tokens of thoughts

    async def run(self, on_begin: Callable[[], None]) -> None:
        """Compute all choices as soon as a slot is free, one after the other in that slot.

        While choices are left, one task waits behind other requests for a further slot, for one of them.
        """
        async with asyncio.TaskGroup() as tasks:
            async with self._slots:
                on_begin()
                while self._left:
                    await self._compute_next(tasks)
            if self._helper is not None:
                self._helper.cancel()
        if not self._failed:
            if not self.answer.halt.is_set():
                self.answer.put(self._usage())
            self.answer.put(None)

    @property
    def _left(self) -> bool:
        """Whether there is a choice to begin."""
        return self._begun < self.answer.ask.choices and not self.answer.halt.is_set()

    async def _compute_next(self, tasks: asyncio.TaskGroup) -> None:
        """Compute one choice, from its first delta to its last. If it fails, the others are halted."""
        choice = self._begun
        self._begun += 1
        if self._left and self._helper is None:
            self._helper = tasks.create_task(self._help(tasks))
        try:
            await self._compute(choice)
        except Exception as error:
            self._fail(error)

    async def _help(self, tasks: asyncio.TaskGroup) -> None:
        async with self._slots:
            self._helper = None
            if self._left:
                await self._compute_next(tasks)

    async def _compute(self, choice: int) -> None:
        answer, engine = self.answer, self._engine
        ask, params = answer.ask, answer.ask.params
        # Marks and the text of a long prompt take a while.
        parting = Parting(choice, await asyncio.to_thread(parts_of, engine, answer), not ask.parallel_calls)
        prompt = await asyncio.to_thread(self._prompt_text) if ask.echo else ""
        assert params.seed is not None
        params = replace(params, seed=(params.seed + choice) % _SEEDS)
        texts = _TokenTexts(engine.token_bytes)
        if ask.echo and params.prompt_logprobs is None:
            answer.put(Said(choice, prompt))
        result: Result | None = None
        given: Any = {"halt": answer.halt, "trees": ask.trees, "shown": parting.shown, "progress": ask.trees}
        async for event in engine.submit(answer.ids, params, **given):
            answer.note(event)
            match event:
                case PromptLogprobs(logprobs=scored) if ask.echo:
                    answer.put(Said(choice, prompt, (), texts.describe_prompt(answer.ids, scored)))
                case TextDelta() if not ask.silent:
                    logprobs = tuple(map(texts.describe, event.logprobs))
                    answer.put_all(parting.feed(event.text, event.token_ids, logprobs))
                case PassStats():
                    self._metrics.passed(event)
                case Finished(result=result):
                    self._metrics.answered(result)
        assert result is not None
        if ask.silent:
            answer.put(Ended(choice, "length"))
            result = replace(result, token_ids=())
        elif result.finish_reason != "halted":
            answer.put_all(parting.finish())
            stop = stop_of(engine, result, params.stop) if result.finish_reason == "stop" else None
            answer.put(Ended(choice, reason_of(result, parting), stop))
        self._results[choice] = result, parting.reasoning_tokens

    def _prompt_text(self) -> str:
        prompt = self.answer.ask.prompt
        return prompt if isinstance(prompt, str) else self._engine.spell(self.answer.ids)

    def _fail(self, error: Exception) -> None:
        """Say once why there is no answer: that halts the other choices, which have no error of their own."""
        if self._failed:
            return
        self._failed = True
        if isinstance(error, OffspecError):
            fault = of_error(error)
            if fault.status >= 500:
                self._metrics.failed(type(error).__name__)
                log.error("%s", error)
        else:  # a bug: the server lives on, and its log has the whole of it
            fault = internal()
            self._metrics.failed(type(error).__name__)
            log.error("a request failed", exc_info=error)
        self.answer.put(fault)
        self.answer.halt.set()

    def _usage(self) -> Usage:
        found = [self._results[choice] for choice in sorted(self._results)]
        return Usage(
            prompt_tokens=self.answer.prompt_tokens,
            cached_tokens=found[0][0].reused_tokens,
            answer_tokens=sum(result.tokens for result, _ in found),
            reasoning_tokens=sum(thought for _, thought in found),
            passes=sum(result.passes for result, _ in found),
        )


class _TokenTexts:
    """Tokens as clients see them: their text, and the bytes behind it, which may be a part of a character.

    token_bytes: what a token stands for, in UTF-8.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._bytes = lru_cache(maxsize=4096)(token_bytes)

    def describe(self, token: TokenLogprobs) -> TokenChoice:
        """A token and the likeliest ones there."""
        top = tuple(self._likely(*pair) for pair in token.top)
        return TokenChoice(self._likely(token.token, token.logprob), top)

    def describe_prompt(
        self, ids: Sequence[int], tokens: Sequence[TokenLogprobs | None]
    ) -> tuple[TokenChoice, ...]:
        """The tokens of a prompt, of which the first has no log-probability."""
        pairs = zip(ids, tokens, strict=True)
        return tuple(
            TokenChoice(self._likely(i, None)) if token is None else self.describe(token)
            for i, token in pairs
        )

    def _likely(self, token: int, logprob: float | None) -> LikelyToken:
        utf8 = self._bytes(token)
        known = None if logprob is None else max(logprob, _LEAST)
        return LikelyToken(utf8.decode("utf-8", "replace"), utf8, known)
