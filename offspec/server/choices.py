"""The choices of one answer, each the engine's answer to the same prompt with the next seed."""

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from offspec.core.errors import OffspecError
from offspec.core.events import Finished, PassStats, PromptLogprobs, Result, TextDelta
from offspec.server.answer import Answer
from offspec.server.exchange import Ended, Said, Usage
from offspec.server.faults import internal, of_error
from offspec.server.metrics import Metrics
from offspec.server.parting import Parting, parts_of, reason_of, stop_of
from offspec.server.served_engine import ServedEngine
from offspec.server.token_texts import TokenTexts

log = logging.getLogger("offspec.server")

_SEEDS = 2**64


class Choices:
    """What threads share that give choices of one answer side by side.

    The first of them begins choices until none is left; others `join` and may leave before.

    Args:
        answer: Takes the events of all choices; their end, once the last thread has left.
        metrics: Counts passes and answers.
    """

    def __init__(self, answer: Answer, metrics: Metrics) -> None:
        self.answer = answer
        self._metrics = metrics
        self._lock = threading.Lock()
        self._begun, self._threads = 0, 1
        self._failed = False
        self._given = dict[int, tuple[Result, int]]()  # and tokens of thoughts

    @property
    def left(self) -> bool:
        """Whether there is a choice to begin."""
        return self._begun < self.answer.ask.choices and not self.answer.halt.is_set()

    def join(self) -> bool:
        """Whether one more thread is to take part: there is something left."""
        with self._lock:
            joins = self.left
            self._threads += joins
            return joins

    def begin(self) -> int | None:
        """The choice that the thread is to `give`; None where none is left."""
        with self._lock:
            if not self.left:
                return None
            self._begun += 1
            return self._begun - 1

    def give(self, engine: ServedEngine, choice: int) -> None:
        """One choice, from its first event to its last. Where it fails, the others are halted."""
        try:
            parting = Parting(choice, parts_of(engine, self.answer), not self.answer.ask.parallel_calls)
            self._given[choice] = self._choose(engine, parting), parting.reasoning_tokens
        except BaseException as error:
            self._fail(error)

    def leave(self) -> bool:
        """The thread has done its part. Whether it was the last one, with which the answer ends."""
        with self._lock:
            self._threads -= 1
            if self._threads:
                return False
        if not self._failed:
            if not self.answer.halt.is_set():
                self.answer.put(self._usage())
            self.answer.put(None)
        return True

    def _choose(self, engine: ServedEngine, parting: Parting) -> Result:
        answer, choice = self.answer, parting.choice
        params, trees = answer.ask.params, answer.ask.trees
        assert params.seed is not None
        params = replace(params, seed=(params.seed + choice) % _SEEDS)
        texts = TokenTexts(engine.token_bytes)
        if answer.ask.echo and params.prompt_logprobs is None:
            answer.put(Said(choice, self._prompt_text(engine)))
        result: Result | None = None
        given: Any = {"halt": answer.halt, "trees": trees, "shown": parting.shown, "progress": trees}
        for event in engine.submit(answer.ids, params, **given):
            answer.tell(event)
            match event:
                case PromptLogprobs(logprobs=scored) if answer.ask.echo:
                    logprobs = texts.describe_prompt(answer.ids, scored)
                    answer.put(Said(choice, self._prompt_text(engine), (), logprobs))
                case TextDelta() if not answer.ask.silent:
                    logprobs = tuple(map(texts.describe, event.logprobs))
                    answer.put_all(parting.feed(event.text, event.token_ids, logprobs))
                case PassStats():
                    self._metrics.passed(event)
                    answer.end_pass()
                case Finished(result=result):
                    self._metrics.answered(result)
        assert result is not None
        if answer.ask.silent:
            answer.put(Ended(choice, "length"))
            return replace(result, token_ids=())
        if result.finish_reason != "halted":
            answer.put_all(parting.finish())
            stop = stop_of(engine, result, params.stop) if result.finish_reason == "stop" else None
            answer.put(Ended(choice, reason_of(result, parting), stop))
        return result

    def _prompt_text(self, engine: ServedEngine) -> str:
        prompt = self.answer.ask.prompt
        return prompt if isinstance(prompt, str) else engine.spell(self.answer.ids)

    def _fail(self, error: BaseException) -> None:
        """Say once why there is no answer: what halts the other choices is no error of theirs."""
        with self._lock:
            first, self._failed = not self._failed, True
        if not first:
            return
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
        results: Sequence[Result] = [result for _, (result, _) in sorted(self._given.items())]
        return Usage(
            prompt_tokens=self.answer.prompt_tokens,
            cached_tokens=results[0].reused_tokens,
            answer_tokens=sum(result.tokens for result in results),
            reasoning_tokens=sum(thought for _, thought in self._given.values()),
            passes=sum(result.passes for result in results),
        )
