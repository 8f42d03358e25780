"""A scripted engine and its loader, for tests of user interfaces without a model and torch.

    engine = ScriptedEngine(["The sky is blue.", Script("Not quite", fail_after=1)])
    session = engine.chat()
    load = ScriptedLoad(engine)  # in place of `offspec.engine.load.load`, and an opener for `offspec.ui`

A token is a word, and a pass yields four tokens, the last of them the bonus token. All figures are made up
and constant, so that snapshots of a chat are too. To pause a pass in the middle of its layers:

    engine.gate.clear()            # before the request
    engine.at_gate.wait(PATIENCE)  # the pass is paused from here on
    engine.gate.set()

To pause the second pass: engine.gate = PassGate(1)
"""

import re
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from offspec.core.config import Constraint, EngineConfig, SamplingParams
from offspec.core.errors import ClosedError, ContextLengthError, DraftError, StreamError
from offspec.core.events import (
    Event,
    Finished,
    FinishReason,
    LoadProgress,
    Mismatch,
    Notice,
    PassProgress,
    PassStats,
    Piece,
    Prefill,
    Result,
    TextDelta,
    TreeSeen,
    ignore_event,
)
from offspec.core.model_info import ModelInfo
from offspec.core.sampling_defaults import sampling_values
from offspec.core.threads import ExclusiveUse
from offspec.core.trace import OFF, Timeline
from offspec.engine.answer import Answer
from offspec.engine.request import Request
from tests.support.waiting import PATIENCE

if TYPE_CHECKING:
    from offspec.chat.answer_parser import AnswerParser
    from offspec.chat.session import Session
    from offspec_planners.plan import Plan

SEED = 7
SECONDS_A_PASS = 0.5  # in the events; the real duration is `delay`
LAYER_BYTES = 10**8

_WORDS = re.compile(r"<\|\w+\|>|\s+(?=<\|)|\s*[^\s<]+|\s*<|\s+")


class PassGate(threading.Event):
    """A gate that lets a number of passes through, and then none until it is opened."""

    def __init__(self, passes: int) -> None:
        super().__init__()
        self._left = passes

    def is_set(self) -> bool:
        self._left -= 1
        return self._left >= 0 or super().is_set()


class ScriptedTokenizer:
    """A tokenizer and a chat template in one: each word is a token, with an id given on first use."""

    def __init__(self) -> None:
        self._words: list[str] = []
        self._ids: dict[str, int] = {}

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Write every message after the name of its role, and open the assistant's turn."""
        turns = "".join(f"<|{message['role']}|>{message['content']}\n" for message in messages)
        return turns + "<|assistant|>"

    def tokenize(self, text: str) -> list[int]:
        ids = []
        for word in _WORDS.findall(text):
            if word not in self._ids:
                self._ids[word] = len(self._words)
                self._words.append(word)
            ids.append(self._ids[word])
        return ids

    def ids(self, prompt: str | Sequence[Any]) -> list[int]:
        """Return the tokens of a text or of messages, or the given ids."""
        if isinstance(prompt, str):
            return self.tokenize(prompt)
        return self.tokenize(self.render(prompt)) if isinstance(prompt[0], dict) else list(prompt)

    def decode_with_special(self, ids: Sequence[int]) -> str:
        return "".join(self._words[i] for i in ids)


@dataclass(frozen=True, slots=True)
class Script:
    """One answer.

    fail_after: passes before `error` is raised; None for no failure. error: by default a StreamError.
    pass_seconds: real duration of a pass, by default the engine's. pass_tokens: tokens per pass. mismatches:
    result of `check`. endless: passes end only when the answer is halted.
    """

    text: str
    fail_after: int | None = None
    error: Exception | None = None
    pass_seconds: float | None = None
    pass_tokens: int = 4
    mismatches: tuple[Mismatch, ...] = ()
    endless: bool = False


class RecordedRequest(NamedTuple):
    """One request, with its arguments."""

    prompt: Any
    params: SamplingParams
    raw: bool = False
    speculate: bool = True
    check: bool = False
    trees: bool = False


class ScriptedEngine:
    """Answers each request with the next script, and starts over after the last.

    Implements the interface that `offspec.ui` and `Session` use. template: marks of a chat template, which
    determine the format of its answers. delay: real duration of a pass in seconds.
    requests: every request so far. notify: receives the events of passes. steps: what began and closed so
        far; if `loud`, each is printed to stderr.
    """

    def __init__(
        self,
        answers: Sequence[str | Script] = ("The sky is blue.",),
        *,
        layers: int = 8,
        context: int = 4096,
        delay: float = 0.0,
        plan: "Plan | None" = None,
        config: EngineConfig | None = None,
        template: str = "",
    ) -> None:
        assert answers
        self.template = template
        self.answers = answers
        self.layers = layers
        self.context = context
        self.delay = delay
        self.plan = plan
        self.config = config or EngineConfig(model="demo")
        self.budget = self.config.budget or 64
        self.width = self.config.width or 8
        self.notify: Callable[[Event], None] = ignore_event
        self.wording = ScriptedTokenizer()
        self.timeline = OFF
        self.requests: list[RecordedRequest] = []
        self.template_given: Mapping[str, Any] | None = None  # of the last prompt
        self.steps: list[str] = []
        self.loud = False
        self.gate = threading.Event()
        self.gate.set()
        self.at_gate = threading.Event()
        self.closed = False
        self._cached: list[int] = []
        self._answering: threading.Thread | None = None  # of the latest `submit`
        self._turns = ExclusiveUse("another answer of this engine is under way")

    def opened(self, notify: Callable[[Event], None]) -> Any:
        """Return itself, as a loader does."""
        return self

    sources: tuple[str, ...] = ()
    sampling_defaults = SamplingParams()

    @property
    def model_info(self) -> ModelInfo:
        marks = {"tools": "<tool_call>" in self.template, "thinking": "</think>" in self.template}
        sizes = {"parameters": 135_000_000, "nbytes": 270_000_000, "weights": "BF16"}
        return ModelInfo("llama", **sizes, vocabulary=10**6, chat_template=self.template, **marks)

    def tokenize(self, text: str, special: bool = False) -> list[int]:
        return self.wording.tokenize(text)

    def encode_infill(self, prefix: str, suffix: str) -> list[int]:
        raise NotImplementedError

    used = "auto"

    def use(self, draft: str) -> None:
        self.used = draft

    @property
    def draft(self) -> str:
        if self.used != "auto":
            return self.used
        return "self (4-bit)" if self.config.draft == "auto" else self.config.draft

    @property
    def placement(self) -> dict[str, Any]:
        return {
            "context": self.context,
            "resident_layers": self.layers // 4,
            "cpu_layers": 0,
            "host_layers": 0,
            "disk_layers": self.layers - self.layers // 4,
            "expert_slots": 0,
            "host_expert_slots": 0,
            "streamed_layers": self.layers - self.layers // 4,
            "slots": 2,
            "staging": 0,
            "head": "device",
            "chunk": 1024,
            "memory": 1_500_000_000,
            "vram": None,
            "gpu_names": [],
        }

    def encode(
        self,
        prompt: str | Sequence[Any],
        raw: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continues: bool = True,
    ) -> list[int]:
        self.template_given = chat_template_kwargs
        return self.ids(prompt)

    def count_tokens(
        self,
        prompt: str | Sequence[Any],
        *,
        raw: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> int:
        return len(self.wording.ids(prompt))

    def ids(self, prompt: str | Sequence[Any]) -> list[int]:
        ids = self.wording.ids(prompt)
        if len(ids) >= self.context:
            raise ContextLengthError(
                f"the prompt is too long: {len(ids)} tokens > {self.context - 1} maximum"
            )
        return ids

    def check(self, params: SamplingParams) -> None:
        pass

    def decode_with_special(self, ids: Sequence[int]) -> str:
        return self.wording.decode_with_special(ids)

    def parts(self, ids: Sequence[int], tools: Sequence[Mapping[str, Any]] = ()) -> "AnswerParser":
        from offspec.chat.answer_parser import PlainTextParser

        if not self.template:
            return PlainTextParser()
        from offspec.model import answer_formats  # imported late: it imports torch

        tokenizer = SimpleNamespace(chat_template=self.template)
        codec: Any = SimpleNamespace(
            tokenizer=tokenizer, special_ids=frozenset(), eos_ids=frozenset(), answer_marks=self.template
        )
        make = answer_formats.find_parts_factory(codec, calls=bool(tools))
        return make(self.decode_with_special(ids), tools) if make else PlainTextParser()

    def answer_format(
        self,
        ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        format: Constraint | None = None,
        thought_tokens: int | None = None,
        required: bool = False,
    ) -> Constraint | None:
        return format

    def token_bytes(self, token: int) -> bytes:
        return self.decode_with_special([token]).encode()

    def chat(
        self,
        *,
        system: str | None = None,
        params: SamplingParams | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> "Session":
        from offspec.chat.conversation import Conversation
        from offspec.chat.session import Session

        conversation = Conversation(model=self.config.model, system=system, params=params or SamplingParams())
        return Session(self, self.wording, conversation)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.closed = True
        if self._answering is not None:
            self._answering.join()
        self.step("engine closed")

    def step(self, what: str) -> None:
        self.steps.append(what)
        if self.loud:
            print(f"[{what}]", file=sys.stderr, flush=True)

    def reloaded(self, config: EngineConfig) -> "ScriptedEngine":
        """Return another engine with the same answers, as loaded with other settings."""
        engine = ScriptedEngine(
            self.answers,
            layers=self.layers,
            context=self.context,
            delay=self.delay,
            plan=self.plan,
            config=config,
        )
        engine.sampling_defaults = self.sampling_defaults
        return engine

    def stream(
        self,
        prompt: str | Sequence[Any],
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        speculate: bool = True,
        check: bool = False,
        halt: threading.Event | None = None,
        trees: bool = False,
        shown: frozenset[int] = frozenset(),
    ) -> Generator[Event, None, None]:
        """Like `Engine.stream`; a prompt other than token ids is tokenized."""
        with self._turns.take():
            if self.closed:
                raise ClosedError("this engine was closed; load the model reloaded")
            params = params or SamplingParams()
            given = self.answers[len(self.requests) % len(self.answers)]
            script = given if isinstance(given, Script) else Script(given)
            prompt = prompt if isinstance(prompt, str) else list(prompt)
            request = RecordedRequest(prompt, params, raw, speculate, check, trees)
            answer = _Answer(self, request, script, halt or threading.Event())
            self.requests.append(request)
            self.step("answering")
            try:
                yield from answer.events(self._reused(answer.ids))
            finally:
                self._cached = answer.ids + answer.tokens
                self.step("stream closed")

    sequences = 1

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        halt: threading.Event | None = None,
        trees: bool = False,
        shown: frozenset[int] = frozenset(),
        progress: bool = False,
    ) -> Answer:
        """Like `Engine.submit`."""
        params, halt = params or SamplingParams(), halt or threading.Event()
        answer = Answer(Request(prompt, params, halt=halt), progress)

        def run() -> None:
            self.notify = answer.on_progress
            try:
                last: list[Event] = []
                for event in self.stream(prompt, params, halt=halt, trees=trees, shown=shown):
                    if isinstance(event, Finished):
                        last = [event]  # reported only after the stream has closed
                    else:
                        answer.put([event])
                answer.put(last, ended=True)
            except BaseException as error:
                answer.put((), error=error)

        self._answering = threading.Thread(target=run, daemon=True)
        self._answering.start()
        return answer

    def _reused(self, ids: list[int]) -> int:
        """Count tokens that the last request left in the cache; the last token of a prompt is always new."""
        same = 0
        for ours, theirs in zip(ids[:-1], self._cached, strict=False):
            if ours != theirs:
                break
            same += 1
        return same


class _Answer:
    """One request in progress."""

    def __init__(
        self, engine: ScriptedEngine, request: RecordedRequest, script: Script, halt: threading.Event
    ) -> None:
        self._engine, self._request, self._script, self._halt = engine, request, script, halt
        self.ids: list[int] = engine.ids(request.prompt)
        self._left = engine.wording.tokenize(script.text)
        room = min(request.params.max_tokens, engine.context - len(self.ids))
        self._reason: FinishReason = "eos" if len(self._left) <= room else "length"
        self._left = self._left[:room]
        self._prefill = Prefill(len(self.ids), 0, 0, engine.layers)
        self.tokens: list[int] = []

    def events(self, reused: int) -> Iterator[Event]:
        engine, passes = self._engine, 0
        self._prefill = Prefill(len(self.ids) - reused, reused, 0, engine.layers)
        with engine.timeline.span("prefill", "prompt", tokens=self._prefill.tokens):
            yield self._prefill
        while self._left:
            if self._script.fail_after == passes:
                raise self._script.error or StreamError(
                    "read failed: Input/output error", file="model.safetensors", offset=4096
                )
            passes += 1
            if not self._run_layers(passes):
                break
            yield from self._commit(passes)
        yield Finished(self._result(passes, reused))

    def _run_layers(self, index: int) -> bool:
        """Run one pass with its events; return False if it was halted."""
        engine = self._engine
        given = self._script.pass_seconds
        step = (engine.delay if given is None else given) / (engine.layers + 1)
        for layer in range(engine.layers + 1):
            if layer == engine.layers // 2 and not self._pass_gate():
                return False
            engine.notify(
                PassProgress(
                    index=index,
                    nodes=engine.budget if layer else 0,
                    layer=layer,
                    layers=engine.layers,
                    bytes_streamed=layer * LAYER_BYTES,
                    seconds=SECONDS_A_PASS * layer / engine.layers,
                )
            )
            if index == 1 and layer:
                engine.notify(Prefill(self._prefill.tokens, self._prefill.reused, layer, engine.layers))
            if self._halt.is_set():
                return False
            if step:
                time.sleep(step)
        return True

    def _pass_gate(self) -> bool:
        """Wait at the gate until it is open; return False if the answer was halted meanwhile."""
        while self._script.endless or not self._engine.gate.is_set():
            self._engine.at_gate.set()
            if self._halt.is_set():
                break
            time.sleep(0.005)
        self._engine.at_gate.clear()
        return not self._halt.is_set()

    def _commit(self, index: int) -> Iterator[Event]:
        count = self._script.pass_tokens
        now, self._left = self._left[:count], self._left[count:]
        # Ids of a prompt may not be words of the script.
        root = (
            self._engine.wording.decode_with_special([*self.ids, *self.tokens][-1:])
            if self._request.trees
            else ""
        )
        self.tokens += now
        words = [self._engine.wording.decode_with_special([token]) for token in now]
        sources = ["draft"] * (len(words) - 1) + ["bonus"]
        pieces = tuple(Piece(word, source) for word, source in zip(words, sources, strict=True))
        yield TextDelta("".join(words), tuple(now), pieces)
        if self._request.trees:
            yield plausible_tree(index, root, words)
        yield PassStats(
            index=index,
            tree_nodes=self._engine.budget,
            tree_depth=len(words),
            draft_steps=len(words),
            emitted=len(words),
            draft_seconds=0.1,
            target_seconds=0.4,
            bytes_streamed=self._engine.layers * LAYER_BYTES,
            wait_seconds=0.15,
            compute_seconds=0.25,
            bytes_read=self._engine.layers * LAYER_BYTES,
        )

    def _result(self, passes: int, reused: int) -> Result:
        engine, seed = self._engine, self._request.params.seed
        done = -(-len(self.tokens) // self._script.pass_tokens)
        return Result(
            text=engine.wording.decode_with_special(self.tokens),
            token_ids=tuple(self.tokens),
            passes=done,
            seconds=SECONDS_A_PASS * passes,
            ttft_s=SECONDS_A_PASS,
            bytes_streamed=done * engine.layers * LAYER_BYTES,
            bytes_read=done * engine.layers * LAYER_BYTES,
            peak_memory_bytes=1_200_000_000,
            finish_reason="halted" if self._left else self._reason,
            draft=engine.draft,
            budget=engine.budget,
            seed=SEED if seed is None else seed,
            draft_seconds=0.1 * done,
            target_seconds=0.4 * done,
            mismatches=self._script.mismatches if self._request.check else None,
            prompt_tokens=len(self.ids),
            reused_tokens=reused,
            sampling=sampling_values(self._request.params),
        )


def plausible_tree(index: int, root: str, words: Sequence[str]) -> TreeSeen:
    """A tree whose accepted path is all words but the last, with two rejected siblings at each node."""
    parent, text, probability, accepted = [-1], [root], [1.0], [0]
    for word in words[:-1]:
        above = accepted[-1]
        here = len(parent)
        accepted.append(here)
        parent += [above, above, above]
        text += [word, " maybe", ","]
        probability += [probability[above] * share for share in (0.8, 0.12, 0.05)]
        parent.append(here + 1)
        text.append(" not")
        probability.append(probability[here + 1] * 0.5)
    return TreeSeen(
        index, tuple(parent), tuple(text), tuple(probability), tuple(accepted), words[-1] if words else ""
    )


class ScriptedLoad:
    """Returns `engine` at first, and a new engine like it at each later call.

    delay: seconds that a load takes. progress: events sent meanwhile. notices: sent by a successful load.
    failing: drafts that cannot be loaded. failing_calls: numbers of calls, from 1, that fail. fail: raised
        instead if set; a test may set and clear it between two calls. gate: a load ends once it is open, as
        it is at first. calls: settings and plan of every call so far. engines: the engines returned, the
        latest last.
    """

    def __init__(
        self,
        engine: ScriptedEngine,
        *,
        delay: float = 0.0,
        progress: Sequence[LoadProgress] | None = None,
        notices: Sequence[str] = (),
        failing: Sequence[str] = (),
        fail: Exception | None = None,
        failing_calls: Sequence[int] = (),
    ) -> None:
        self.engine, self.fail, self.failing = engine, fail, failing
        self.failing_calls = failing_calls
        self.progress = load_progress(3) if progress is None else progress
        self.calls: list[tuple[EngineConfig, Path | None]] = []
        self.engines: list[ScriptedEngine] = []
        self.timeline: Timeline | None = None
        self.gate = threading.Event()
        self.gate.set()
        self._delay, self._notices = delay, notices

    def __call__(
        self,
        config: EngineConfig,
        plan: Path | None = None,
        notify: Callable[[Event], None] = ignore_event,
        timeline: Timeline | None = None,
        at_once: bool = False,
    ) -> ScriptedEngine:
        self.calls.append((config, plan))
        self.timeline = timeline
        try:
            self.engine.step("loading")
            self._report(notify)
        except KeyboardInterrupt:
            self.engine.step("load interrupted")
            raise
        if config.draft in self.failing:
            raise DraftError(f"{config.draft} has another vocabulary")
        if len(self.calls) in self.failing_calls:
            raise StreamError("the disk is away", file="model.safetensors", offset=0)
        if self.fail is not None:
            raise self.fail
        for notice in self._notices:
            notify(Notice(notice))
        engine = self.engine.reloaded(config) if self.engines else self.engine
        engine.config, engine.notify, engine.timeline = config, notify, timeline or OFF
        self.engines.append(engine)
        return engine

    def _report(self, notify: Callable[[Event], None]) -> None:
        for event in self.progress:
            notify(event)
            if self._delay:
                time.sleep(self._delay / len(self.progress))
        self.gate.wait(PATIENCE)

    def as_module(self) -> ModuleType:
        """A stand-in for the module `offspec.engine.load`."""
        module = ModuleType("offspec.engine.load")
        vars(module)["load"] = self
        return module


def load_progress(steps: int) -> list[LoadProgress]:
    """Progress of a load in this many steps of a gigabyte."""
    return [LoadProgress("reading the model", step * 10**9, steps * 10**9) for step in range(1, steps + 1)]
