"""The engine: a loaded model that answers prompts."""

import secrets
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

from offspec.chat.conversation import Conversation
from offspec.chat.session import Session
from offspec.core.config import EngineConfig, SamplingParams, check_comparable, checked_params
from offspec.core.errors import RequestError
from offspec.core.events import Event, Finished, Notice, Result
from offspec.core.threads import stream_in_thread
from offspec.core.trace import OFF, Timeline
from offspec.engine.answer import Answer, StreamedAnswer
from offspec.engine.decode_state import DecodeState, StatePool
from offspec.engine.drafting import Drafting
from offspec.engine.pass_runner import PassRunner
from offspec.engine.prefix_cache import open_prefix_cache
from offspec.engine.prompt_encoder import PromptEncoder
from offspec.engine.request import (
    Draft,
    Request,
    RequestOptions,
    ScheduledRequest,
    SharedOptions,
    check_options,
    with_params,
)
from offspec.engine.scheduler import Scheduler, closed_error
from offspec.engine.sequence import RunningSequence
from offspec.model import answer_formats, devices
from offspec.model.cpu_contention import CpuContention
from offspec.model.prompt import Prompt
from offspec.plan.build_plan import expert_record
from offspec.plan.load import Assembly, describe
from offspec.plan.policy import DraftPolicy
from offspec.plan.records import DraftRecord, save_experts
from offspec_planners.plan import Plan
from offspec_planners.tree_growth import RecordedTree

_BUSY = "another answer of this engine is running; read its stream to the end or close it"


class Engine(PromptEncoder):
    """A loaded target and draft, as a context manager; see `load`. Requests of `submit` share passes."""

    def __init__(
        self,
        config: EngineConfig,
        assembly: Assembly,
        notify: Callable[[Event], None],
        timeline: Timeline = OFF,
        *,
        policy: DraftPolicy | None = None,
        record: DraftRecord | None = None,
    ) -> None:
        """Create an engine from loaded models; see `load`.

        Args:
            config: Configuration of the engine.
            assembly: The loaded models.
            notify: Receives notices and progress events.
            timeline: Records passes.
            policy: Tree growth policy. None: as `config` specifies.
            record: Acceptance record of the main drafter.
        """
        super().__init__(assembly)
        self.config = config
        self.timeline = timeline
        self._notify = notify
        policy = policy or DraftPolicy.fixed(config)
        experts = expert_record(assembly.target, assembly.target_fingerprint, keeps=config.learn)
        self.drafting = Drafting(config, assembly, policy, record, experts)
        for complaint in (answer_formats.template_error(assembly.codec), assembly.codec.sampling_warning):
            if complaint:
                notify(Notice(complaint))
        self._contention = CpuContention()
        self._passes = PassRunner(assembly, self.drafting, timeline, self._contention)
        self._states = StatePool(assembly, timeline, open_prefix_cache(config, assembly, notify))
        self._scheduler = Scheduler(self._begin, self._passes, self._states)
        self._streams: weakref.WeakSet[Generator[Event, None, None]] = weakref.WeakSet()
        self._readers = dict[StreamedAnswer, int]()  # last reading thread of each open stream
        self._closed = False
        devices.synchronize(self._assembly.target.devices)  # loading used this thread's current stream

    def __repr__(self) -> str:
        if self._closed:
            return f"<Engine {self.config.model}, closed>"
        return (
            f"<Engine {self.config.model} on {self.config.device}: layers {layers_by_tier(self.placement)}; "
            f"draft {self.draft}; budget {self.budget}; context {self.context}>"
        )

    @property
    def draft(self) -> str:
        """Default draft sources of requests, for display; "none" if there are none."""
        return self.drafting.describe_sources(self.drafting.names)

    @property
    def sources(self) -> tuple[str, ...]:
        """Names that a request's `draft` accepts, in addition to "none"."""
        return self._assembly.sources.names

    def use(self, draft: Draft) -> None:
        """Set the default draft sources of requests.

        Args:
            draft: Some of `sources`; "auto": the sources requested by `load`.

        Raises:
            RequestError: A source is not loaded.
        """
        self.drafting.use(draft)

    @property
    def width(self) -> int:
        """Maximum nodes expanded per draft step."""
        return self.drafting.policy.growth.width

    @property
    def budget(self) -> int:
        """Maximum nodes per pass of a request with the default draft."""
        return self.drafting.budget

    @property
    def plan(self) -> Plan | None:
        """Plan with the expected speed and the reasons for the settings; None if all settings were given."""
        return self.drafting.policy.plan

    @property
    def sequences(self) -> int:
        """Maximum number of requests that share passes."""
        return self._states.max_states

    @property
    def placement(self) -> dict[str, Any]:
        """Numbers of layers by tier and of slots, the context size, and the memory limits."""
        return describe(self._assembly)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        check: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Generator[Event, None, None]:
        """Answer a prompt, yielding events as they happen.

        Each pass begins when the events of the previous one have been read. Streams of several threads and
        requests of `submit` share passes, up to `config.sequences` at a time; further requests are queued.

        Args:
            prompt: Text (one user message, or plain text if `raw`), chat messages, or token ids in a list,
                an array or a tensor [T]. If the last message is an answer, it is continued.
            params: Sampling parameters and stop conditions; greedy by default.
            check: Decode again with one token per pass, and report differing tokens in the result.
            options: See `RequestOptions`: raw, draft, speculate, chat_template_kwargs, halt, trees, shown.

        Raises:
            OffspecError: See `offspec.core.errors`; the engine stays usable.
        """
        params = checked_params(params)
        if check and options.get("speculate", True):
            check_comparable(self.config.verify, params)
        events = self._stream(check, *self._request(prompt, params, options))
        self._streams.add(events)
        return events

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        check: bool = False,
        **options: Unpack[SharedOptions],
    ) -> Result:
        """Answer a prompt and return the result, which is the last event of `stream`."""
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
        """Async version of `stream`; cancelling or closing it halts the answer."""
        halt = threading.Event()

        def start() -> Generator[Event, None, None]:
            return self.stream(prompt, params, check=check, halt=halt, trees=trees, **options)

        return stream_in_thread(start, halt.set)

    async def agenerate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        check: bool = False,
        **options: Unpack[SharedOptions],
    ) -> Result:
        """Async version of `generate`; cancelling it halts the answer."""
        events = self.astream(prompt, params, check=check, **options)
        finished = [event async for event in events if isinstance(event, Finished)]
        return finished[0].result

    def _request(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions
    ) -> tuple[Request, Callable[[], list[int]]]:
        """Return a request without token ids, and a function that encodes its prompt."""
        check_options(options)
        request = Request(
            ids=(),
            params=params if params.seed is not None else replace(params, seed=secrets.randbits(63)),
            sources=self.drafting.select_sources(options.get("draft"))
            if options.get("speculate", True)
            else (),
            halt=options.get("halt") or threading.Event(),
            trees=options.get("trees", False),
            shown=options.get("shown", frozenset()),
        )
        raw, template = options.get("raw", False), options.get("chat_template_kwargs")
        return request, partial(self.encode, prompt, raw, template)

    def _stream(
        self, check: bool, request: Request, encode: Callable[[], list[int]]
    ) -> Generator[Event, None, None]:
        self._check_free()
        answer = StreamedAnswer(replace(request, ids=encode()), self._scheduler, self._notify)
        try:
            with answer:
                while events := answer.next_events():
                    for event in events:
                        if check and isinstance(event, Finished) and event.result.finish_reason != "halted":
                            event = Finished(answer.with_mismatches(event.result))
                        self._readers[answer] = threading.get_ident()
                        yield event
        finally:
            self._readers.pop(answer, None)

    def _check_wait(self) -> None:
        if self._scheduler.in_scheduler_thread:
            raise RequestError(_BUSY)

    def _check_free(self) -> None:
        """Raise ClosedError, or RequestError if the calling thread would wait for itself."""
        if self._closed:
            raise closed_error()
        self._check_wait()
        if threading.get_ident() in self._readers.values():
            raise RequestError(_BUSY)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        progress: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Answer:
        """Queue a request and return immediately. Up to `config.sequences` requests share passes.

        The tokens are the same as with `stream`.

        Args:
            prompt: As in `stream`.
            params: As in `stream`.
            progress: Also send Prefill and PassProgress events during passes.
            options: As in `stream`.

        Raises:
            RequestError: The prompt or a parameter is invalid, or a stream is open in the same thread.
            ClosedError: The engine was closed.
        """
        if not self._scheduler.in_scheduler_thread:
            self._check_free()
        params = checked_params(params)
        self.check(params)
        request, encode = self._request(prompt, params, options)
        answer = Answer(replace(request, ids=encode()), progress, self._check_wait)
        self._scheduler.submit(answer)
        return answer

    def generate_many(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        **options: Unpack[SharedOptions],
    ) -> list[Result]:
        """Answer several prompts, which share passes; see `submit`.

        Args:
            prompts: Prompts as in `stream`.
            params: Sampling parameters for all prompts, or one for each.
            options: Options for all prompts, as in `submit`.

        Raises:
            OffspecError: The first error in the order of prompts; the other answers are cancelled.
        """
        with self._submitted(prompts, params, options) as answers:
            return [answer.result() for answer in answers]

    async def agenerate_many(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        **options: Unpack[SharedOptions],
    ) -> list[Result]:
        """Async version of `generate_many`; cancelling it cancels the answers."""
        with self._submitted(prompts, params, options) as answers:
            return [await answer for answer in answers]

    @contextmanager
    def _submitted(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None,
        options: SharedOptions,
    ) -> Iterator[list[Answer]]:
        """Submit several prompts; cancel their answers at the end of the block. Raises RequestError."""
        pairs = with_params(prompts, params)
        answers = list[Answer]()
        try:
            for prompt, own in pairs:
                answers.append(self.submit(prompt, own, **options))
            yield answers
        finally:
            for answer in answers:
                answer.cancel()

    def chat(
        self,
        *,
        system: str | None = None,
        params: SamplingParams | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Session:
        """Begin a conversation that computes only the new tokens of each question; see `Session`.

        Args:
            system: System message; None by default.
            params: Sampling parameters of all answers; greedy by default.
            chat_template_kwargs: Variables for the chat template in all turns, such as
                {"enable_thinking": False}. They are not saved with the conversation.

        Raises:
            RequestError: Unknown template variables, or a system message that is not valid Unicode.
        """
        conversation = Conversation(model=self.config.model, system=system, params=checked_params(params))
        return Session(self, self._assembly.codec.with_template_kwargs(chat_template_kwargs), conversation)

    def _begin(self, answer: ScheduledRequest, state: DecodeState) -> RunningSequence:
        sequence = RunningSequence(answer, self._assembly, state, self.drafting, self._notify)
        self._contention.begin()
        return sequence

    def preview(
        self, prompt: Prompt, params: SamplingParams, *, trees: int = 3, raw: bool = False
    ) -> list[RecordedTree]:
        """Return trees that the draft grows along its own answer, without a pass; see `self_rollout`.

        Args:
            prompt: As in `stream`.
            params: As in `stream`.
            trees: Number of trees, 3 by default.
            raw: As in `stream`.

        Raises:
            OffspecError: See `offspec.core.errors`.
        """
        self._check_free()
        ids, params = self.encode(prompt, raw), replace(params, seed=params.seed or 0)
        with self._scheduler.paused():
            if self._states.busy:
                raise RequestError(_BUSY)
            devices.synchronize(self._assembly.target.devices)
            return self.drafting.preview(ids, params, trees, self.context)

    def set_draft_policy(self, policy: DraftPolicy) -> None:
        """Set the tree growth policy from the next answer on, within the reserved memory."""
        self.drafting.policy = policy

    def close(self) -> None:
        """Stop prefetching and free the models. May be called twice.

        Open streams end. An answer read in another thread is halted; `close` waits for its end.
        """
        self._check_wait()
        self._scheduler.close()
        for events in list(self._streams):
            with suppress(ValueError):  # the generator is running in another thread
                events.close()
        with self._scheduler.paused():
            try:
                devices.synchronize(self._assembly.target.devices)  # passes used the stream of their thread
            finally:
                self._free()

    def _free(self) -> None:
        learnt, self._closed = not self._closed, True
        try:
            if learnt:
                self._states.save_prefixes()
                if self.config.learn:
                    save_experts(self._assembly.target, self._assembly.target_fingerprint)
        finally:
            self._states.close()
            self._assembly.sources.close()
            self._assembly.target.close()
            self._contention.close()
        if learnt:
            self.drafting.save()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def layers_by_tier(placement: Mapping[str, Any]) -> str:
    """Return the numbers of layers by the place of their weights, for display; see `Engine.placement`."""
    tiers = {"resident": "resident", "cpu": "on the CPU", "host": "in RAM", "disk": "on disk"}
    counts = {where: placement[f"{tier}_layers"] for tier, where in tiers.items()}
    return ", ".join(f"{count} {where}" for where, count in counts.items() if count)
