"""The engine: a model that was loaded once, and answers prompts."""

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
from offspec.core.threads import in_thread
from offspec.core.trace import OFF, Timeline
from offspec.engine.answer import Answer, StreamedAnswer
from offspec.engine.decode import DecodeState, StatePool
from offspec.engine.drafting import Drafting
from offspec.engine.passes import Passes
from offspec.engine.prefixes import open_prefixes
from offspec.engine.request import (
    Draft,
    Request,
    RequestOptions,
    SharedOptions,
    Submitted,
    check_options,
    with_params,
)
from offspec.engine.scheduler import Scheduler, closed
from offspec.engine.sequence import RunningSequence
from offspec.engine.texts import Texts
from offspec.model import answer_formats
from offspec.model.contention import Contention
from offspec.model.prompt import Prompt
from offspec.plan.load import Assembly, describe
from offspec.plan.make import expert_record
from offspec.plan.policy import DraftPolicy
from offspec.plan.records import DraftRecord, save_experts
from offspec_planners.plan import Plan
from offspec_planners.tree_growth import Grown

_BUSY = "another answer of this engine is under way; read its stream to the end or close it"


class Engine(Texts):
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
        """policy: how trees are grown, by default as `config` says; record: where learning is kept."""
        super().__init__(assembly)
        self.config = config
        self.timeline = timeline
        self._notify = notify
        policy = policy or DraftPolicy.fixed(config)
        experts = expert_record(assembly.target, assembly.target_print, keeps=config.learn)
        self.drafting = Drafting(config, assembly, policy, record, experts)
        for complaint in (answer_formats.complaint(assembly.codec), assembly.codec.sampling_complaint):
            if complaint:
                notify(Notice(complaint))
        self._contention = Contention()
        self._passes = Passes(assembly, self.drafting, timeline, self._contention)
        self._states = StatePool(assembly, timeline, open_prefixes(config, assembly, notify))
        self._scheduler = Scheduler(self._begin, self._passes, self._states)
        self._streams: weakref.WeakSet[Generator[Event, None, None]] = weakref.WeakSet()
        self._readers = dict[StreamedAnswer, int]()  # the thread that read last of each open stream
        self._closed = False

    def __repr__(self) -> str:
        if self._closed:
            return f"<Engine {self.config.model}, closed>"
        return (
            f"<Engine {self.config.model} on {self.config.device}: layers {layers_by_tier(self.placement)}; "
            f"draft {self.draft}; budget {self.budget}; context {self.context}>"
        )

    @property
    def draft(self) -> str:
        """The draft sources of requests that do not name any, for display; "none" without one."""
        return self.drafting.described(self.drafting.names)

    @property
    def sources(self) -> tuple[str, ...]:
        """The names that a request's `draft` may choose among, beside "none"."""
        return self._assembly.sources.names

    def use(self, draft: Draft) -> None:
        """Set the draft sources of requests that do not name any.

        Args:
            draft: Some of `sources`; "auto": those that `load` was asked for.

        Raises:
            RequestError: A source that was not loaded.
        """
        self.drafting.use(draft)

    @property
    def width(self) -> int:
        """Most nodes that a draft step expands."""
        return self.drafting.policy.growth.width

    @property
    def budget(self) -> int:
        """Most nodes verified in a pass of a request that does not name its draft."""
        return self.drafting.budget

    @property
    def plan(self) -> Plan | None:
        """What is expected of this engine and why it is set up so; None where all settings were given."""
        return self.drafting.policy.plan

    @property
    def sequences(self) -> int:
        """Most requests of `submit` that share passes."""
        return self._states.most

    @property
    def placement(self) -> dict[str, Any]:
        """Counts of layers by tier and of slots, the context, and the memory limits."""
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

        Passes begin as their events are read. Streams of several threads, and requests of `submit`, share
        passes, `config.sequences` of them at a time; others wait until one has ended or was closed.

        Args:
            prompt: Text (one message of the user, or plain text when `raw`), chat messages, or token ids, in
                a list, an array or a tensor [T]. An answer that the messages end with is continued.
            params: How tokens are chosen, and when to stop; greedy by default.
            check: Decode once more, one token a pass, and report in the result where tokens differ, if they
                do.
            options: Those of `RequestOptions`: raw, draft, speculate, chat_template_kwargs, halt, trees,
                shown.

        Raises:
            OffspecError: See `offspec.core.errors`; the engine can be used on.
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

    def _request(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions
    ) -> tuple[Request, Callable[[], list[int]]]:
        """A request as its options say, and what encodes its prompt, which it lacks."""
        check_options(options)
        request = Request(
            ids=(),
            params=params if params.seed is not None else replace(params, seed=secrets.randbits(63)),
            sources=self.drafting.chosen(options.get("draft")) if options.get("speculate", True) else (),
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
                            event = Finished(answer.checked(event.result))
                        self._readers[answer] = threading.get_ident()
                        yield event
        finally:
            self._readers.pop(answer, None)

    def _check_wait(self) -> None:
        if self._scheduler.is_here:
            raise RequestError(_BUSY)

    def _check_free(self) -> None:
        """Raise ClosedError, or RequestError where the calling thread would wait for itself."""
        if self._closed:
            raise closed()
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
        """Have a prompt answered beside others, which share passes: `config.sequences` of them at a time.

        The tokens are those of `stream`. It returns at once.

        Args:
            prompt: As in `stream`.
            params: As in `stream`.
            progress: Send the Prefill and PassProgress events of passes that are under way, too.
            options: As in `stream`.

        Raises:
            RequestError: The prompt or the parameters are wrong, or a stream is open in the same thread.
            ClosedError: The engine was closed.
        """
        if not self._scheduler.is_here:
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
        """The answers to several prompts, which share passes; see `submit`.

        Args:
            prompts: As in `stream`.
            params: For all of them, or as many as there are prompts.
            options: As in `submit`, for all of them.

        Raises:
            OffspecError: As soon as one of them fails, in the order of prompts; the others are cancelled.
        """
        with self._submitted(prompts, params, options) as answers:
            return [answer.result() for answer in answers]

    async def agenerate_many(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        **options: Unpack[SharedOptions],
    ) -> list[Result]:
        """`generate_many` for `async` callers; cancelled, it cancels the answers."""
        with self._submitted(prompts, params, options) as answers:
            return [await answer for answer in answers]

    @contextmanager
    def _submitted(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None,
        options: SharedOptions,
    ) -> Iterator[list[Answer]]:
        """Answers to several prompts, cancelled at the end of the block. Raises RequestError."""
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
            params: How its answers are chosen; greedy by default.
            chat_template_kwargs: Variables for the chat template in all its turns, such as
                {"enable_thinking": False}. They are not saved with the conversation.

        Raises:
            RequestError: Variables that no template has, or a system message that is not valid Unicode.
        """
        conversation = Conversation(model=self.config.model, system=system, params=checked_params(params))
        return Session(self, self._assembly.codec.with_template(chat_template_kwargs), conversation)

    def _begin(self, answer: Submitted, state: DecodeState) -> RunningSequence:
        sequence = RunningSequence(answer, self._assembly, state, self.drafting, self._notify)
        self._contention.begin()
        return sequence

    def preview(
        self, prompt: Prompt, params: SamplingParams, *, trees: int = 3, raw: bool = False
    ) -> list[Grown]:
        """Trees that the draft grows along an answer of its own, without a pass; see `self_rollout`.

        Args:
            prompt: As in `stream`.
            params: As in `stream`.
            trees: How many, 3 by default.
            raw: As in `stream`.

        Raises:
            OffspecError: See `offspec.core.errors`.
        """
        self._check_free()
        ids, params = self.encode(prompt, raw), replace(params, seed=params.seed or 0)
        with self._scheduler.paused():
            if self._states.busy:
                raise RequestError(_BUSY)
            return self.drafting.preview(ids, params, trees, self.context)

    def follow(self, policy: DraftPolicy) -> None:
        """Grow trees by another policy, within the room there is, from the next answer on."""
        self.drafting.policy = policy

    def close(self) -> None:
        """Stop reading ahead and free the models. May be called twice.

        Streams that are still open end; an answer that is read in another thread is halted, and waited for.
        """
        self._check_wait()
        self._scheduler.close()
        for events in list(self._streams):
            with suppress(ValueError):  # it is running in another thread
                events.close()
        with self._scheduler.paused():
            self._free()

    def _free(self) -> None:
        learnt, self._closed = not self._closed, True
        try:
            if learnt:
                self._states.keep()
                if self.config.learn:
                    save_experts(self._assembly.target, self._assembly.target_print)
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
    """Counts of layers by where their weights are, for display; see `Engine.placement`."""
    tiers = {"resident": "resident", "cpu": "on the CPU", "host": "in RAM", "disk": "on disk"}
    counts = {where: placement[f"{tier}_layers"] for tier, where in tiers.items()}
    return ", ".join(f"{count} {where}" for where, count in counts.items() if count)
