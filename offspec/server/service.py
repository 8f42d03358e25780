"""The engine behind all APIs: its state, the queue in front of it, and answers on their way to clients.

A thread loads the engine, and closes it in the end. Requests get its sequences first come first served;
choices of one request are computed side by side where sequences are free.
"""

import asyncio
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal, TypeVar

from offspec.core.config import SamplingParams
from offspec.core.errors import OffspecError, RequestError
from offspec.core.events import Event, LoadProgress, Notice
from offspec.core.sampling_defaults import SamplingOverrides
from offspec.server.choices import Choices
from offspec.server.delta_stream import DeltaStream
from offspec.server.exchange import Ask
from offspec.server.faults import Fault, invalid, of_error, unsupported
from offspec.server.formats import forces_call, with_forced_call
from offspec.server.metrics import Metrics
from offspec.server.served_engine import Loader, ServedEngine

log = logging.getLogger("offspec.server")

State = Literal["loading", "ready", "failed", "stopping"]
_T = TypeVar("_T")
_NOTICES = 100  # that are kept, at most
_FINISH_S = 60.0  # for a prompt to be computed after the last client has left, which may ask again
# Arguments of transformers' function, with which a client could do other things than set a variable.
_NO_VARIABLES = {
    *("chat_template", "conversation", "tools", "documents", "tokenize", "add_generation_prompt"),
    *("continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens"),
}


class Service:
    """Loads an engine in a thread of its own and answers requests with it.

    Args:
        load: Loads the engine, which is closed in the end.
        names: What requests may call the model, the one that is shown first.
        sampling: Parameters of requests that do not set them, over the model's defaults.
        max_queue: Requests that may wait while others are answered.
        tool_grammar: Calls of tools follow a grammar, from their opening mark on.
        open_schemas: Objects of a schema may have properties that it does not name.
        metrics: Counts what happens.
        on_failure: Called from the thread where loading failed, with the error in `error`.
    """

    def __init__(
        self,
        load: Loader,
        *,
        names: Sequence[str],
        sampling: SamplingOverrides | None = None,
        max_queue: int = 32,
        tool_grammar: bool = True,
        open_schemas: bool = False,
        metrics: Metrics | None = None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self.names, self._sampling = tuple(names), sampling or SamplingOverrides()
        self.metrics = metrics or Metrics()
        self.max_queue, self.tool_grammar, self.open_schemas = max_queue, tool_grammar, open_schemas
        self.created = int(time.time())
        self.state: State = "loading"
        self.progress = LoadProgress("starting", 0, 0, "steps")
        self.notices = deque[Notice](maxlen=_NOTICES)  # the latest, for whoever takes them
        self.error: BaseException | None = None
        self._load, self._on_failure = load, on_failure
        self._engine: ServedEngine | None = None
        self._slots: asyncio.Semaphore | None = None  # sequences of the engine that are free
        self._tasks = set[asyncio.Task[None]]()
        self._stopped = threading.Event()
        self._waiting = set[DeltaStream]()
        self.metrics.watch_queue(lambda: len(self._waiting))
        self._running = set[DeltaStream]()
        self._leaves = 0  # so far, of clients, with their answers or without
        self._encoder = ThreadPoolExecutor(1, "offspec encode")
        self._thread = threading.Thread(target=self._work, name="offspec engine", daemon=True)

    def start(self) -> None:
        """Begin to load."""
        self._thread.start()

    @property
    def queue_length(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def loaded(self) -> bool:
        """There was an engine."""
        return self._engine is not None

    @property
    def in_flight(self) -> int:
        """Requests that are being answered or wait."""
        return len(self._waiting) + len(self._running)

    @property
    def idle(self) -> bool:
        """Nothing is being answered, and nothing waits."""
        return not self.in_flight

    @property
    def engine(self) -> ServedEngine:
        """The engine. Raises Fault while there is none."""
        if self.state == "loading":
            raise Fault("unavailable", f"the model is loading: {self.progress.stage}", retry_after=5)
        if self._engine is None or self.state != "ready":
            raise Fault("unavailable", "the server is stopping", retry_after=5)
        return self._engine

    @property
    def context(self) -> int | None:
        """Tokens that a prompt and its answer may have together; None while there is no engine."""
        return None if self._engine is None else self._engine.context

    @property
    def defaults(self) -> SamplingParams:
        """Parameters of requests that set none. Raises Fault while there is no engine."""
        return self._sampling.over(self.engine.sampling_defaults)

    @property
    def sampling_summary(self) -> str:
        """The sampling defaults and their source, for a log, once the model is loaded."""
        assert self._engine is not None
        summary = self._sampling.summary(self._engine.sampling_defaults, "`greedy` for temperature 0")
        return f"sampling defaults: {summary}"

    @property
    def sequences(self) -> int:
        """Requests that are answered side by side. Raises Fault while there is no engine."""
        return self.engine.sequences

    def check_name(self, name: str) -> str:
        """The name of a request's model; "" stands for the one that is served. Raises Fault for another."""
        if name and name not in self.names:
            known = " or ".join(self.names)
            raise Fault(
                "not_found",
                f"the model {name[:200]!r} is not served here, only {known}",
                field="model",
                code="model_not_found",
            )
        return name or self.names[0]

    async def encode(self, ask: Ask) -> list[int]:
        """The token ids of a prompt. Raises Fault, also for parameters that the engine cannot follow."""
        engine, template = self.engine, _template(ask)

        def work() -> list[int]:
            engine.check(ask.params)
            if ask.suffix is not None:
                assert isinstance(ask.prompt, str)
                return engine.encode_infill(ask.prompt, ask.suffix)
            return engine.encode(ask.prompt, ask.raw, template, ask.continues)

        return await self._encode(work)

    async def _formatted(self, ask: Ask, ids: list[int]) -> Ask:
        """The request with the format of its answer: of calls that it may make, and after reasoning."""
        if ask.params.format is not None and not self.open_schemas:
            ask = replace(ask, params=replace(ask.params, format=ask.params.format.closed))
        engine, params, forced = self.engine, ask.params, forces_call(ask)
        tools = ask.tools.callable if forced or self.tool_grammar else ()
        if ask.raw or not (tools or params.format) or (params.ignore_eos and not forced):
            return ask
        thought = min(params.max_tokens, engine.context - len(ids)) // 2
        format = await self._encode(
            lambda: engine.answer_format(ids, tools, params.format, thought, required=forced)
        )
        if forced and (format is None or params.format is not None):
            ask = with_forced_call(ask)
            given = ask.params.format
            format = await self._encode(lambda: engine.answer_format(ids, (), given, thought))
        try:
            return replace(ask, params=replace(ask.params, format=format))
        except RequestError as error:
            raise of_error(error) from None

    async def count(self, ask: Ask) -> int:
        """Tokens of a prompt, of any length. Raises Fault."""
        count, template = self.engine.count_tokens, _template(ask)
        return await self._encode(lambda: count(ask.prompt, raw=ask.raw, chat_template_kwargs=template))

    async def tokenize(self, text: str, special: bool) -> list[int]:
        """Token ids of a text of any length. Raises Fault."""
        engine = self.engine
        return await self._encode(lambda: engine.tokenize(text, special))

    async def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included. Raises Fault."""
        engine, known = self.engine, range(self.engine.model_info.vocabulary)
        if not all(token in known for token in ids):
            raise invalid("tokens", f"ids must be from 0 to {known[-1]}")
        return await self._encode(lambda: engine.spell(ids))

    async def _encode(self, work: Callable[[], _T]) -> _T:
        """Run work of the tokenizer, which takes a tenth of a second and more for a long prompt."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._encoder, work)
        except OffspecError as error:
            fault = of_error(error)
            if fault.code == "context_length_exceeded":  # coding agents show a message of their own instead
                log.info("refused: %s", fault.message)
            raise fault from error

    async def answer(self, ask: Ask, *, admitted: bool = False) -> DeltaStream:
        """An answer, which waits for its turn if there are others. Raises Fault where there will be none.

        admitted: a part of a request that waited already, which may wait however many others do.
        """
        if not admitted:
            self._check_room()
        if ask.params.seed is None:
            ask = replace(ask, params=replace(ask.params, seed=secrets.randbits(63)))
        ids = await self.encode(ask)
        answer = DeltaStream(await self._formatted(ask, ids), ids, self._leave)
        if not admitted:
            self._check_room()
        self._waiting.add(answer)
        self._make_way()
        task = asyncio.create_task(self._compute(answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return answer

    async def _compute(self, answer: DeltaStream) -> None:
        """Compute an answer as soon as a sequence is free."""
        engine = self._engine
        assert engine is not None
        self._slots = self._slots or asyncio.Semaphore(engine.sequences)

        def begin() -> None:
            self._running.add(answer)
            self._waiting.discard(answer)
            answer.begun.set()

        try:
            await Choices(engine, answer, self._slots, self.metrics).run(begin)
        finally:
            self._running.discard(answer)

    def _check_room(self) -> None:
        """Raises Fault where no more requests may wait, or none are taken."""
        if len(self._waiting) >= self.max_queue and self._wanted:
            raise Fault(
                "rate_limit",
                f"{len(self._waiting)} requests wait already, and no more may: try again later",
                code="queue_full",
                retry_after=10,
            )

    @property
    def _wanted(self) -> list[DeltaStream]:
        """Answers whose clients are there."""
        return [answer for answer in [*self._waiting, *self._running] if not answer.abandoned]

    @property
    def _abandoned(self) -> list[DeltaStream]:
        """Answers whose clients have left while the prompt is computed."""
        return [answer for answer in [*self._running] if answer.abandoned and not answer.halt.is_set()]

    def _leave(self, answer: DeltaStream) -> None:
        """End an answer whose client has left, unless its prompt can be kept for the next request."""
        if answer in self._waiting or answer.prompt_computed or self.state != "ready":
            answer.halt.set()
        self._waiting.discard(answer)
        self._make_way()
        self._leaves += 1
        if self._abandoned:
            asyncio.get_running_loop().call_later(_FINISH_S, self._give_up, self._leaves)

    def _make_way(self) -> None:
        """End abandoned answers, unless all other requests begin with at least half of their prompt."""
        wanted = self._wanted
        for answer in self._abandoned:
            start = answer.ids[: len(answer.ids) // 2]
            if any(other.ids[: len(start)] != start for other in wanted):
                answer.halt.set()

    def _give_up(self, leaves: int) -> None:
        """End abandoned answers, unless a client waits for them, or one has left since (`leaves`)."""
        if not self._wanted and leaves == self._leaves:
            for answer in self._abandoned:
                answer.halt.set()

    async def stop(self, patience: float) -> None:
        """Take no more requests, let the one under way go on for some seconds, and break off what is left.

        The engine's thread then closes it and ends.
        """
        self.state = "stopping" if self.state != "failed" else "failed"
        for answer in [*self._waiting, *self._abandoned]:
            _break_off(answer)
        deadline = asyncio.get_running_loop().time() + patience
        while self._running and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        for answer in [*self._running]:
            _break_off(answer)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._stopped.set()
        self._encoder.shutdown(wait=False, cancel_futures=True)

    def join(self, seconds: float) -> bool:
        """Whether the thread has ended, engine closed, within some seconds."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        """The engine's thread."""
        try:
            engine = self._load(self._hear)
        except BaseException as error:  # it is for whoever started the server to say
            self.error, self.state = error, "failed"
            self._on_failure()
            return
        try:
            self._engine = engine
            self.metrics.link_seconds = 0.0 if engine.plan is None else engine.plan.costs.link
            if self.state == "loading":
                self.state = "ready"
                log.info("ready to answer as %s", " or ".join(self.names))
                log.info("%s", self.sampling_summary)
            self._stopped.wait()
        finally:
            engine.close()

    def _hear(self, event: Event) -> None:
        """Progress of the load, from the engine's thread."""
        match event:
            case LoadProgress():
                self.progress = event
            case Notice(text=text):
                log.info("%s", text)
                self.notices.append(event)


def _template(ask: Ask) -> dict[str, Any]:
    """Variables of the chat template, tools included. Raises Fault for those that are none."""
    if wrong := sorted(_NO_VARIABLES & ask.template.keys()):
        raise unsupported(
            "chat_template_kwargs", f"{wrong[0]} is no variable of a chat template; leave it out"
        )
    tools = [] if ask.tools.choice == "none" else [dict(tool) for tool in ask.tools.functions]
    return {**ask.template, "tools": tools} if tools else dict(ask.template)


def _break_off(answer: DeltaStream) -> None:
    answer.put(Fault("unavailable", "the answer was broken off: the server is stopping", retry_after=5))
    answer.halt.set()
