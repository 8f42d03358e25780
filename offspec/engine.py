"""The engine: load a model once, then answer prompts."""

import secrets
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, cast

from offspec.answer import Answer, Request
from offspec.assemble import Assembly, describe
from offspec.choose import Way, prepare
from offspec.concurrent import Turns, in_thread
from offspec.config import DraftBits, EngineConfig, PackFormat, SamplingParams, Tree, Verify, parse_bytes
from offspec.conversation import Conversation
from offspec.draft.base import Scorer
from offspec.ending import Ending
from offspec.errors import ClosedError, RequestError
from offspec.events import Event, Finished, Mismatch, Result, unheard
from offspec.ledger import DraftRecord, read_plan
from offspec.noise import GumbelNoise
from offspec.preview import preview
from offspec.sampling import LogitsProcessor
from offspec.sequence import Decoding, TokenSequence
from offspec.session import Session
from offspec.text.codec import Messages
from offspec.text.stream import TextStream
from offspec.timeline import OFF, Timeline
from offspec_planners.best_first import Grown
from offspec_planners.calibrate import Calibration
from offspec_planners.plan import Plan

_PREVIEWED = 256  # nodes at least of a previewed tree, where there is room
_CLOSING_S = 0.02  # how often `close` looks whether an answer in another thread has ended
_STRIDE = 10  # tokens from one previewed tree to the next: about a pass

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]


def load(
    model: str,
    *,
    draft: str = "auto",
    draft_bits: DraftBits | None = None,
    memory: str | int | None = None,
    vram: str | int | None = None,
    device: str = "cpu",
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    budget: int | None = None,
    width: int | None = None,
    context: int | None = None,
    verify: Verify = "coupled",
    tree: Tree = "dynamic",
    temperature: float = 0.0,
    quantize: PackFormat | None = None,
    plan: str | Path | Plan | None = None,
    replan: bool = False,
    learn: bool = True,
    notify: Callable[[Event], None] | None = None,
    timeline: Timeline | None = None,
) -> "Engine":
    """Open a model and everything it needs to answer.

    model: a hub id, a folder, a .gguf file, or "demo". draft: the same, or "auto" (a substitute: the
    target itself in few bits), or "none". draft_bits: 2, 3, 4, or 16, which leaves a named draft as it is;
    by default that, and for a substitute the most that fit. memory: a promise for the whole process,
    "1.5GB" or bytes; vram: the same for the memory of a CUDA device. budget: most nodes verified in a pass;
    width: nodes that a draft step expands; None for what a plan says is fastest, which is measured once and
    kept for later runs. tree: "sequoia" fills one optimised shape instead of growing each tree anew.
    temperature: what is planned for. quantize: round the target's matrices, once, into a pack in the cache,
    and run that. plan: one to follow instead, or its file; replan: make one anew. learn: keep for later runs
    what answers teach about the draft. notify: takes LoadProgress and Notice events now, and Prefill ones as
    layers of a first pass complete. timeline: records what runs when, for its `write`. Raises OffspecError.
    """
    config = EngineConfig(
        model=model,
        draft=draft,
        draft_bits=draft_bits,
        memory=None if memory is None else parse_bytes(memory),
        vram=None if vram is None else parse_bytes(vram),
        device=device,
        dtype=dtype,
        budget=budget,
        width=width,
        context=context,
        verify=verify,
        tree=tree,
        temperature=temperature,
        learn=learn,
        quantize=quantize,
    )
    return open_engine(config, plan=plan, replan=replan, notify=notify, timeline=timeline)


def open_engine(
    config: EngineConfig,
    *,
    plan: str | Path | Plan | None = None,
    replan: bool = False,
    notify: Callable[[Event], None] | None = None,
    timeline: Timeline | None = None,
) -> "Engine":
    """What `load` does, with its settings in one piece. Raises OffspecError."""
    named = read_plan(Path(plan)) if isinstance(plan, str | Path) else plan
    notify, timeline = notify or unheard, timeline or OFF
    with timeline.span("engine", "load"):
        ready = prepare(config, notify, timeline, named=named, replan=replan)
    return Engine(ready.config, ready.assembly, notify, timeline, way=ready.way, record=ready.record)


class Engine:
    """A loaded target and draft. One request at a time; a context manager; see `load`."""

    def __init__(
        self,
        config: EngineConfig,
        assembly: Assembly,
        notify: Callable[[Event], None],
        timeline: Timeline = OFF,
        *,
        way: Way | None = None,
        record: DraftRecord | None = None,
    ) -> None:
        """way: how trees are grown, by default as `config` says; record: where learning is kept, if it is."""
        self.config = config
        self._way = way or Way.fixed(config)
        self._record = record
        self.timeline = timeline
        self._assembly = assembly
        self._notify = notify
        self._sequence = TokenSequence(assembly.target, assembly.drafter, timeline)
        self._calibrations: dict[tuple[float, bool], Calibration] = {}
        self._turns = Turns(
            "another answer of this engine is under way; read its stream to the end or close it"
        )
        self._streams: weakref.WeakSet[Generator[Event, None, None]] = weakref.WeakSet()
        self._halt: threading.Event | None = None  # of the latest answer
        self._closed = False

    @property
    def draft(self) -> str:
        """What drafts: a name for people, or "none"."""
        return self._assembly.drafter.name if self._assembly.drafter else "none"

    @property
    def width(self) -> int:
        """Nodes that a draft step expands at most."""
        return self._way.policy.width

    @property
    def budget(self) -> int:
        """The most nodes verified in a pass."""
        return self._way.policy.budget

    @property
    def plan(self) -> Plan | None:
        """What is expected of this engine and why it is set up so; None where all settings were given."""
        return self._way.plan

    @property
    def context(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return self._assembly.context

    @property
    def placement(self) -> dict[str, Any]:
        """Counts of layers by tier and of slots, the context, and the memory promised."""
        return describe(self._assembly)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        speculate: bool = True,
        check: bool = False,
    ) -> Result:
        """The whole answer. See `stream`, whose last event carries this result."""
        for event in self.stream(prompt, params, raw=raw, speculate=speculate, check=check):
            if isinstance(event, Finished):
                return event.result
        raise AssertionError("a stream ends with Finished")

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        speculate: bool = True,
        check: bool = False,
        halt: threading.Event | None = None,
        trees: bool = False,
    ) -> Generator[Event, None, None]:
        """Answer a prompt, yielding events as they happen.

        prompt: text (one message of the user, or plain text when `raw`), chat messages, or token ids.
        speculate: False decodes one token a pass, which gives the same tokens, slowly. check: decode once
        more in that way and report in the result where tokens differ, if they do. halt: once it is set, from
        whichever thread, the pass under way is broken off and the answer ends with what there is. trees:
        send a TreeSeen for every pass. Raises OffspecError.
        A second thread waits until the first stream has ended or was closed.
        """
        request = Request((), _seeded(params), speculate, halt or threading.Event(), trees)
        events = self._stream(prompt, raw, check, request)
        self._streams.add(events)
        return events

    def _stream(
        self, prompt: Prompt, raw: bool, check: bool, request: Request
    ) -> Generator[Event, None, None]:
        with self._turn(request.halt):
            self._halt = request.halt
            request = replace(request, ids=self._encode(prompt, raw))
            answer, result = self._answer(request), None
            for event in answer.events():
                if isinstance(event, Finished):
                    result = event.result
                else:
                    yield event
            assert result is not None
            if check and result.finish_reason != "halted":
                result = replace(result, mismatches=self._check(request, result, answer.gaps))
            yield Finished(result)

    def chat(self, *, system: str | None = None, params: SamplingParams | None = None) -> Session:
        """A conversation, in which every question follows on what was said before; see `Session`."""
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
        given = [] if isinstance(prompt, str) else [item for item in prompt if isinstance(item, int)]
        if given and len(given) == len(prompt):
            ids = given
        else:
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

    def _answer(self, request: Request) -> Answer:
        return Answer(
            request,
            self._assembly,
            self._sequence,
            lambda ending, answer: self._decoding(request, ending, answer),
            context=self.context,
            draft=self.draft,
            budget=self.budget,
            notify=self._notify,
            timeline=self.timeline,
        )

    def _decoding(self, request: Request, ending: Ending, answer: Answer | None = None) -> Decoding:
        target, params = self._assembly.target, request.params
        vocabulary, device = target.skeleton.vocab_size, target.device
        processor = LogitsProcessor(params, vocabulary, request.ids, device)
        assert params.seed is not None
        noise = GumbelNoise(params.seed, vocabulary, device) if processor.uses_noise else None
        coupled = noise if self.config.verify == "coupled" else None
        calibration = self._calibration(params.temperature, coupled is not None)
        return Decoding(
            processor=processor,
            noise=noise,
            scorer=Scorer(processor, coupled, calibration) if request.speculate else None,
            policy=self._way.recording(calibration),
            shape=self._way.shape,
            stop=ending.after,
            between=answer.look if answer else None,
            grown=answer.grown if answer else None,
        )

    def _calibration(self, temperature: float, coupled: bool) -> Calibration:
        """What is known of the draft for such requests, to learn into."""
        if self._record is not None:
            return self._record.entry(temperature, coupled)
        return self._calibrations.setdefault((temperature, coupled), Calibration())

    def preview(
        self, prompt: Prompt, params: SamplingParams, *, trees: int = 3, raw: bool = False
    ) -> list[Grown]:
        """Trees that the draft grows along an answer of its own, without a pass; see `offspec.preview`.

        Raises OffspecError.
        """
        drafter, room = self._assembly.drafter, self.config.budget or 1
        nodes = min(room, max(_PREVIEWED, 2 * self.budget))
        params = replace(params, seed=params.seed or 0)
        with self._turn():
            if drafter is None or nodes < 2:
                return []
            ids = self._encode(prompt, raw)
            ending = Ending(params, frozenset(), TextStream(self._assembly.codec, ()))
            decoding = self._decoding(Request(ids, params), ending)
            assert decoding.scorer is not None
            policy = replace(self._way.policy, budget=nodes // 2, record=nodes, costs=None)
            return preview(drafter, decoding.scorer, ids, policy, _STRIDE, trees, self.context)

    def follow(self, way: Way) -> None:
        """Grow trees in another way from the next answer on. Its budget must be within the room there is."""
        self._way = way

    def _check(self, request: Request, result: Result, gaps: Sequence[float]) -> tuple[Mismatch, ...] | None:
        """The first place where decoding without speculation differs; what follows it is another text.

        None where it was halted before it came to an end.
        """
        self._sequence.forget()  # keys and values that came with a tree would be taken for right
        for event in self._answer(replace(request, speculate=False, trees=False)).events():
            if isinstance(event, Finished):
                alone, reason = event.result.token_ids, event.result.finish_reason
        for index, (token, other) in enumerate(zip(result.token_ids, alone, strict=False)):
            if token != other:
                return (Mismatch(index, token, other, gaps[index]),)
        return None if reason == "halted" else ()

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
        learnt = None if self._closed else self._record
        self._closed = True
        if self._assembly.drafter is not None:
            self._assembly.drafter.close()
        self._assembly.target.close()
        if learnt is not None:
            learnt.save()

    def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        speculate: bool = True,
        check: bool = False,
        trees: bool = False,
    ) -> AsyncGenerator[Event, None]:
        """`stream` for `async` callers; cancelled or closed, it halts the answer."""
        halt = threading.Event()
        return in_thread(
            lambda: self.stream(
                prompt, params, raw=raw, speculate=speculate, check=check, halt=halt, trees=trees
            ),
            halt.set,
        )

    async def agenerate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        speculate: bool = True,
        check: bool = False,
    ) -> Result:
        """`generate` for `async` callers; cancelled, it halts the answer."""
        events = self.astream(prompt, params, raw=raw, speculate=speculate, check=check)
        finished = [event async for event in events if isinstance(event, Finished)]
        return finished[0].result

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _seeded(params: SamplingParams | None) -> SamplingParams:
    params = params or SamplingParams()
    return params if params.seed is not None else replace(params, seed=secrets.randbits(63))
