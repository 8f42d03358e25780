"""The engine: a model that was loaded once, and answers prompts."""

import secrets
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Unpack

from offspec.chat.conversation import Conversation
from offspec.chat.session import Session
from offspec.core.config import EngineConfig, SamplingParams, check_comparable, checked_params
from offspec.core.errors import ClosedError, OffspecError, RequestError
from offspec.core.events import Event, Finished, Notice, Result
from offspec.core.threads import ExclusiveUse
from offspec.core.trace import OFF, Timeline
from offspec.engine.answer import Answer
from offspec.engine.asking import Asking
from offspec.engine.checking import compared
from offspec.engine.decode import DecodeState
from offspec.engine.drafting import Drafting, Request
from offspec.engine.options import Draft, RequestOptions, check_options
from offspec.engine.passes import Passes
from offspec.engine.prefixes import open_prefixes
from offspec.engine.request import RunningRequest
from offspec.engine.scheduler import Scheduler
from offspec.engine.sequences import Sequences
from offspec.engine.texts import Texts
from offspec.model import answer_formats
from offspec.model.contention import Contention
from offspec.model.prompt import Prompt
from offspec.plan.hot_experts import save_experts
from offspec.plan.load import Assembly, describe
from offspec.plan.make import expert_record
from offspec.plan.policy import DraftPolicy
from offspec.plan.records import DraftRecord
from offspec_planners.best_first import Grown
from offspec_planners.plan import Plan

_BUSY = "another answer of this engine is under way; read its stream to the end or close it"
_CLOSING_S = 0.02  # how often `close` looks whether an answer in another thread has ended


class Engine(Texts, Asking):
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
        self.config = config
        self.timeline = timeline
        self._assembly = assembly
        self._notify = notify
        policy = policy or DraftPolicy.fixed(config)
        experts = expert_record(assembly.target, assembly.target_print, keeps=config.learn)
        self.drafting = Drafting(config, assembly, policy, record, experts)
        for complaint in (answer_formats.complaint(assembly.codec), assembly.codec.sampling_complaint):
            if complaint:
                notify(Notice(complaint))
        prefixes = open_prefixes(config, assembly, notify)
        self._prefixes = prefixes
        self._contention = Contention()
        self._passes = Passes(assembly, self.drafting, timeline, self._contention)
        self._state = DecodeState(assembly.target, assembly.sources, timeline, prefixes)
        self._sequences = Sequences(self._state, self._new_state, assembly.sequences)
        self._scheduler = Scheduler(self._begin_answer, self._passes, self._sequences, self._turn)
        self._turns = ExclusiveUse(_BUSY)
        self._streams: weakref.WeakSet[Generator[Event, None, None]] = weakref.WeakSet()
        self._halt: threading.Event | None = None  # of the latest answer
        self._closed = False

    def __repr__(self) -> str:
        if self._closed:
            return f"<Engine {self.config.model}, closed>"
        layers = self.placement
        tiers = {"resident": "resident", "cpu": "on the CPU", "host": "in RAM", "disk": "on disk"}
        held = [f"{count} {where}" for tier, where in tiers.items() if (count := layers[f"{tier}_layers"])]
        return (
            f"<Engine {self.config.model} on {self.config.device}: layers {', '.join(held)}; "
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
    def sampling_defaults(self) -> SamplingParams:
        """Sampling parameters that the model sets in its generation_config.json; greedy if it sets none.

        The commands use them. In Python pass them, or a copy by `dataclasses.replace`, as `params`.
        """
        return self._assembly.codec.sampling_defaults

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
        return self._sequences.most

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

        A second thread waits until the first stream has ended or was closed.

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

    def _request(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions
    ) -> tuple[Request, Callable[[], list[int]]]:
        """A request as its options say, and what encodes its prompt, which it lacks."""
        check_options(options)
        request = Request(
            ids=(),
            params=_seeded(params),
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
        with self._turn(request.halt):
            self._halt = request.halt
            request = replace(request, ids=encode())
            running = self._begin(request, self._state, self._notify)
            events: list[Event] = [running.prefill]
            while True:
                for event in events:
                    yield event
                    self._turns.move_here()  # whatever thread reads the stream on has the turn
                if running.reason is not None:
                    break
                try:
                    (events,) = self._passes.step([running])
                except OffspecError:
                    yield from running.held_back()
                    raise
            result = running.result
            if check and running.reason != "halted":
                alone = self._unspeculated(request)
                result = replace(result, mismatches=compared(result, running.gaps, alone))
            yield Finished(result)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        progress: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Answer:
        """Have a prompt answered beside others, which share passes: `config.sequences` of them at a time.

        The tokens are those of `stream`. It returns at once; streams and answers wait for each other's end.

        Args:
            prompt: As in `stream`.
            params: As in `stream`.
            progress: Send the Prefill and PassProgress events of passes that are under way, too.
            options: As in `stream`.

        Raises:
            RequestError: The prompt or the parameters are wrong, or a stream is open in the same thread.
            ClosedError: The engine was closed.
        """
        if self._turns.mine and not self._scheduler.is_here:
            raise RequestError(_BUSY)
        params = checked_params(params)
        self.check(params)
        request, encode = self._request(prompt, params, options)
        answer = Answer(replace(request, ids=encode()), progress)
        self._scheduler.submit(answer)
        return answer

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

    @contextmanager
    def _turn(self, halt: threading.Event | None = None) -> Iterator[None]:
        """One request at a time. Raises ClosedError, or RequestError instead of waiting for itself."""
        with self._turns.take(halt):
            if self._closed:
                raise ClosedError("this engine was closed; load the model again")
            yield

    def _begin(self, request: Request, state: DecodeState, notify: Callable[[Event], None]) -> RunningRequest:
        running = RunningRequest(request, self._assembly, state, self.drafting, notify)
        self._contention.begin()
        return running

    def _begin_answer(self, answer: Answer, state: DecodeState) -> RunningRequest:
        def notify(event: Event) -> None:
            if isinstance(event, Notice):
                self._notify(event)
            elif answer.progress:
                answer.put([event])

        return self._begin(answer.request, state, notify)

    def _new_state(self) -> DecodeState:
        """One more sequence."""
        assembly, cache = self._assembly, self._state.cache.another()
        sources = assembly.sources.fork(cache)
        return DecodeState(assembly.target, sources, self.timeline, self._prefixes, cache)

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
        with self._turn():
            params = replace(params, seed=params.seed or 0)
            return self.drafting.preview(self.encode(prompt, raw), params, trees, self.context)

    def follow(self, policy: DraftPolicy) -> None:
        """Grow trees by another policy, within the room there is, from the next answer on."""
        self.drafting.policy = policy

    def _unspeculated(self, request: Request) -> Result:
        """A request's answer with one token a pass."""
        self._state.forget()  # keys and values that came with a tree would be taken for right
        alone = self._begin(replace(request, sources=(), trees=False), self._state, self._notify)
        while alone.reason is None:
            self._passes.step([alone])
        return alone.result

    def close(self) -> None:
        """Stop reading ahead and free the models. May be called twice.

        Streams that are still open end; an answer that is read in another thread is halted, and waited for.
        """
        self._scheduler.close()
        while True:
            for events in list(self._streams):
                with suppress(ValueError):  # it is running in another thread
                    events.close()
            if self._halt is not None:
                self._halt.set()
            with suppress(*() if self._turns.mine else (RequestError,)), self._turns.take(wait=False):
                self._free()
                return
            time.sleep(_CLOSING_S)

    def _free(self) -> None:
        learnt, self._closed = not self._closed, True
        try:
            if learnt:
                for state in self._sequences.all:
                    state.keep()
                if self.config.learn:
                    save_experts(self._assembly.target, self._assembly.target_print)
        finally:
            for state in self._sequences.all:
                state.close()
            self._assembly.sources.close()
            self._assembly.target.close()
            self._contention.close()
        if learnt:
            self.drafting.save()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _seeded(params: SamplingParams) -> SamplingParams:
    return params if params.seed is not None else replace(params, seed=secrets.randbits(63))
