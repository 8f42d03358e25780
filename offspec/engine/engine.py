"""The engine: a model that was loaded once, and answers prompts."""

import secrets
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from operator import index
from types import TracebackType
from typing import Any, TypedDict, Unpack, cast

from offspec.chat.conversation import Conversation
from offspec.chat.session import Session
from offspec.core.config import EngineConfig, SamplingParams, check_comparable
from offspec.core.errors import ClosedError, OffspecError, RequestError
from offspec.core.events import Event, Finished, Mismatch, Result
from offspec.core.threads import ExclusiveUse, in_thread
from offspec.core.trace import OFF, Timeline
from offspec.engine.decode import DecodeState
from offspec.engine.drafting import Drafting, Request
from offspec.engine.request import RunningRequest
from offspec.model.contention import Contention
from offspec.model.tokenizer import Messages
from offspec.plan.load import Assembly, describe
from offspec.plan.policy import DraftPolicy
from offspec.plan.records import DraftRecord
from offspec_planners.best_first import Grown
from offspec_planners.plan import Plan

_CLOSING_S = 0.02  # how often `close` looks whether an answer in another thread has ended

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]  # ids also as an array or a tensor
Draft = str | Sequence[str]  # names, joined by commas or one by one


class RequestOptions(TypedDict, total=False):
    """What a request may say beside its prompt and parameters; see `Engine.stream`."""

    raw: bool
    draft: Draft | None
    speculate: bool
    check: bool


class Engine:
    """A loaded target and draft. One request at a time; a context manager; see `load`."""

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
        self.drafting = Drafting(config, assembly, policy or DraftPolicy.fixed(config), record)
        self._state = DecodeState(assembly.target, assembly.sources, timeline)
        self._turns = ExclusiveUse(
            "another answer of this engine is under way; read its stream to the end or close it"
        )
        self._streams: weakref.WeakSet[Generator[Event, None, None]] = weakref.WeakSet()
        self._halt: threading.Event | None = None  # of the latest answer
        self._contention = Contention()
        self._closed = False

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
    def context(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return self._assembly.context

    @property
    def placement(self) -> dict[str, Any]:
        """Counts of layers by tier and of slots, the context, and the memory limits."""
        return describe(self._assembly)

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Result:
        """The whole answer. See `stream`, whose last event carries this result."""
        *_, last = self.stream(prompt, params, **options)
        assert isinstance(last, Finished)
        return last.result

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        draft: Draft | None = None,
        speculate: bool = True,
        check: bool = False,
        halt: threading.Event | None = None,
        trees: bool = False,
    ) -> Generator[Event, None, None]:
        """Answer a prompt, yielding events as they happen.

        A second thread waits until the first stream has ended or was closed.

        Args:
            prompt: Text (one message of the user, or plain text when `raw`), chat messages, or token ids.
            params: How tokens are chosen, and when to stop; greedy by default.
            raw: Continue text as it is, without the chat template.
            draft: Which of `sources` draft for this request, by default what was loaded for it; "none": no
                draft.
            speculate: False decodes one token a pass: the same tokens, slowly.
            check: Decode once more in that way, and report in the result where tokens differ, if they do.
            halt: Once it is set, from any thread, the pass under way is broken off and the answer ends.
            trees: Send a TreeSeen for every pass.

        Raises:
            OffspecError: See `offspec.core.errors`; the engine can be used on.
        """
        if check and speculate:
            check_comparable(self.config.verify, params or SamplingParams())
        sources = self.drafting.chosen(draft) if speculate else ()
        request = Request((), _seeded(params), sources, halt or threading.Event(), trees)
        events = self._stream(prompt, raw, check, request)
        self._streams.add(events)
        return events

    def _stream(
        self, prompt: Prompt, raw: bool, check: bool, request: Request
    ) -> Generator[Event, None, None]:
        with self._turn(request.halt):
            self._halt = request.halt
            request = replace(request, ids=self._encode(prompt, raw))
            running = self._begin(request)
            events: list[Event] = [running.prefill]
            while True:
                for event in events:
                    yield event
                    self._turns.move_here()  # whatever thread reads the stream on has the turn
                if running.reason is not None:
                    break
                try:
                    events = running.step()
                except OffspecError:
                    yield from running.held_back()
                    raise
            result = running.result
            if check and running.reason != "halted":
                result = replace(result, mismatches=self._check(request, result, running.gaps))
            yield Finished(result)

    def chat(self, *, system: str | None = None, params: SamplingParams | None = None) -> Session:
        """Begin a conversation that computes only the new tokens of each question; see `Session`.

        Args:
            system: System message; None by default.
            params: How its answers are chosen; greedy by default.
        """
        conversation = Conversation(model=self.config.model, system=system, params=params or SamplingParams())
        return Session(self, self._assembly.codec, conversation)

    @contextmanager
    def _turn(self, halt: threading.Event | None = None) -> Iterator[None]:
        """One request at a time. Raises ClosedError, or RequestError instead of waiting for itself."""
        with self._turns.take(halt):
            if self._closed:
                raise ClosedError("this engine was closed; load the model again")
            yield

    def _encode(self, prompt: Prompt, raw: bool) -> list[int]:
        """Token ids of a prompt that leaves room for an answer."""
        ids = _token_ids(prompt)
        if ids is None:
            ids = self._assembly.codec.encode_prompt(cast(str | Messages, prompt), raw)
        size = self._assembly.target.skeleton.vocab_size
        if not all(0 <= token < size for token in ids):
            raise RequestError(
                f"the prompt has a token that the model does not know: ids go from 0 to {size - 1}"
            )
        if len(ids) >= self.context:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, and the context has room for {self.context} with the "
                "answer; shorten it, or load with a larger --context"
            )
        return ids

    def _begin(self, request: Request) -> RunningRequest:
        return RunningRequest(
            request,
            self._assembly,
            self._state,
            self.drafting,
            self._notify,
            self.timeline,
            self._contention,
        )

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
            return self.drafting.preview(self._encode(prompt, raw), params, trees, self.context)

    def follow(self, policy: DraftPolicy) -> None:
        """Grow trees by another policy, within the room there is, from the next answer on."""
        self.drafting.policy = policy

    def _check(self, request: Request, result: Result, gaps: Sequence[float]) -> tuple[Mismatch, ...] | None:
        """The first place where decoding without speculation differs; what follows it is another text.

        None where it was halted before it came to an end.
        """
        self._state.forget()  # keys and values that came with a tree would be taken for right
        alone = self._begin(replace(request, sources=(), trees=False))
        while alone.reason is None:
            alone.step()
        tokens, others = result.token_ids, alone.result.token_ids
        for place, (token, other) in enumerate(zip(tokens, others, strict=False)):
            if token != other:
                return (Mismatch(place, token, other, gaps[place]),)
        if alone.reason == "halted":
            return None
        if (len(tokens), result.finish_reason) == (len(others), alone.reason):
            return ()
        place = min(len(tokens), len(others))  # one of them ended there, or they ended for other reasons
        said, unspeculated = (ids[place] if place < len(ids) else None for ids in (tokens, others))
        return (Mismatch(place, said, unspeculated, 0.0),)

    def close(self) -> None:
        """Stop reading ahead and free the models. May be called twice.

        Streams that are still open end; an answer that is read in another thread is halted, and waited for.
        """
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
        self._assembly.sources.close()
        self._assembly.target.close()
        self._contention.close()
        if learnt:
            self.drafting.save()

    def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        trees: bool = False,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[Event, None]:
        """`stream` for `async` callers; cancelled or closed, it halts the answer."""
        halt = threading.Event()
        return in_thread(lambda: self.stream(prompt, params, halt=halt, trees=trees, **options), halt.set)

    async def agenerate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Result:
        """`generate` for `async` callers; cancelled, it halts the answer."""
        events = self.astream(prompt, params, **options)
        finished = [event async for event in events if isinstance(event, Finished)]
        return finished[0].result

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _token_ids(prompt: Prompt) -> list[int] | None:
    """Ids, from a list, an array or a tensor of them; None for text and messages."""
    if isinstance(prompt, str) or len(prompt) == 0:
        return None
    try:
        return [index(item) for item in prompt]  # type: ignore[arg-type]
    except TypeError:
        return None


def _seeded(params: SamplingParams | None) -> SamplingParams:
    params = params or SamplingParams()
    return params if params.seed is not None else replace(params, seed=secrets.randbits(63))
