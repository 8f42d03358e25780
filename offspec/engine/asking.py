"""Ways to ask that others make of two: a stream, and an answer that is submitted."""

import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping
from typing import Unpack

from offspec.core.config import SamplingParams, checked_params
from offspec.core.errors import RequestError
from offspec.core.events import Event, Finished, Result
from offspec.core.threads import in_thread
from offspec.engine.answer import Answer
from offspec.engine.options import RequestOptions, SharedOptions
from offspec.model.prompt import Prompt


class Asking(ABC):
    """Whole answers, many of them, and all of it for `async` callers."""

    @abstractmethod
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        check: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Generator[Event, None, None]: ...

    @abstractmethod
    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        progress: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Answer: ...

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        check: bool = False,
        **options: Unpack[SharedOptions],
    ) -> Result:
        """The whole answer. See `stream`, whose last event carries this result."""
        *_, last = self.stream(prompt, params, check=check, **options)
        assert isinstance(last, Finished)
        return last.result

    def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        check: bool = False,
        trees: bool = False,
        **options: Unpack[SharedOptions],
    ) -> AsyncGenerator[Event, None]:
        """`stream` for `async` callers; cancelled or closed, it halts the answer."""
        halt = threading.Event()

        def start() -> Generator[Event, None, None]:
            return self.stream(prompt, params, check=check, halt=halt, trees=trees, **options)

        return in_thread(start, halt.set)

    async def agenerate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        check: bool = False,
        **options: Unpack[SharedOptions],
    ) -> Result:
        """`generate` for `async` callers; cancelled, it halts the answer."""
        events = self.astream(prompt, params, check=check, **options)
        finished = [event async for event in events if isinstance(event, Finished)]
        return finished[0].result

    def generate_many(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        **options: Unpack[SharedOptions],
    ) -> list[Result]:
        """The answers to several prompts, which share passes; see `submit`.

        Args:
            prompts: As in `stream`.
            params: For all of them, or as many as there are prompts.
            options: As in `submit`, for all of them.

        Raises:
            OffspecError: As soon as one of them fails, in the order of prompts; the others are cancelled.
        """
        answers = self._submit_all(prompts, params, options)
        try:
            return [answer.result() for answer in answers]
        finally:
            _cancel(answers)

    async def agenerate_many(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        **options: Unpack[SharedOptions],
    ) -> list[Result]:
        """`generate_many` for `async` callers; cancelled, it cancels the answers."""
        answers = self._submit_all(prompts, params, options)
        try:
            return [await answer for answer in answers]
        finally:
            _cancel(answers)

    def _submit_all(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None,
        options: SharedOptions,
    ) -> list[Answer]:
        if isinstance(prompts, str):
            raise RequestError("`generate_many` takes a list of prompts, not one text: put it in brackets")
        every = [*prompts]
        if isinstance(params, Iterable) and not isinstance(params, str | Mapping):
            each = [*params]
        else:
            each = [checked_params(params)] * len(every)
        if len(each) != len(every):
            raise RequestError(f"there are {len(each)} `params` for {len(every)} prompts; give one for each")
        answers = list[Answer]()
        try:
            for prompt, own in zip(every, each, strict=True):
                answers.append(self.submit(prompt, own, **options))
        except BaseException:
            _cancel(answers)
            raise
        return answers


def _cancel(answers: Iterable[Answer]) -> None:
    for answer in answers:
        answer.cancel()
