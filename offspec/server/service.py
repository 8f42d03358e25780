"""The engine that all APIs share: its state, its queue, and answers on their way to clients.

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
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from offspec.core.cache_dir import cache_root
from offspec.core.config import SamplingParams
from offspec.core.errors import OffspecError
from offspec.core.events import Event, LoadProgress, Notice
from offspec.core.private_folders import RESPONSES
from offspec.server.api_errors import ApiError, api_error_from, invalid
from offspec.server.delta_stream import DeltaStream
from offspec.server.metrics import Metrics
from offspec.server.protocol import GenerateRequest
from offspec.server.settings import Settings
from offspec.server.stored_responses import StoredResponses
from offspec.server.structured_outputs import with_format

if TYPE_CHECKING:
    from offspec.engine.engine import Engine

log = logging.getLogger("offspec.server")

Loader = Callable[[Callable[[Event], None]], "Engine"]  # takes a listener: progress, notices, passes
State = Literal["loading", "ready", "failed", "stopping"]
_T = TypeVar("_T")
_NOTICES = 100  # that are kept, at most
_FINISH_S = 60.0  # for a prompt to be computed after the last client has left, which may ask again


class Service:
    """Loads an engine in a thread of its own and answers requests with it.

    responses, ignored_names: those of all requests. error: why loading failed.

    Args:
        load: Loads the engine, which is closed in the end.
        settings: Of the server.
        on_failure: Called from the thread where loading failed.
    """

    def __init__(
        self, load: Loader, settings: Settings, on_failure: Callable[[], None] = lambda: None
    ) -> None:
        self.settings, self.names = settings, settings.served_model_names
        self.metrics = Metrics()
        self.responses = StoredResponses(cache_root() / RESPONSES)
        self.ignored_names = set[str]()  # parts of requests without effect that the log names already
        self.created = int(time.time())
        self.state: State = "loading"
        self.progress = LoadProgress("starting", 0, 0, "steps")
        self.notices = deque[Notice](maxlen=_NOTICES)  # the latest, for whoever takes them
        self.error: BaseException | None = None
        self._load, self._on_failure = load, on_failure
        self._engine: Engine | None = None
        self._slots: asyncio.Semaphore | None = None  # sequences of the engine that are free
        self._tasks = dict[DeltaStream, asyncio.Task[None]]()  # of answers that are computed or wait
        self._stopped = threading.Event()
        self.metrics.watch_queue(lambda: self.queue_length)
        self._leaves = 0  # so far, of clients, with their answers or without
        self._encoder = ThreadPoolExecutor(1, "offspec encode")
        self._thread = threading.Thread(target=self._work, name="offspec engine", daemon=True)

    def start(self) -> None:
        """Begin to load."""
        self._thread.start()

    @property
    def _waiting(self) -> list[DeltaStream]:
        """Answers that wait for a sequence and are wanted."""
        return [each for each in list(self._tasks) if not each.started.is_set() and not each.halt.is_set()]

    @property
    def _running(self) -> list[DeltaStream]:
        return [each for each in list(self._tasks) if each.started.is_set()]

    @property
    def queue_length(self) -> int:
        """Number of queued requests."""
        return len(self._waiting)

    @property
    def loaded(self) -> bool:
        """Whether the engine was loaded."""
        return self._engine is not None

    @property
    def in_flight(self) -> int:
        """Requests that are being answered or wait."""
        return len(self._waiting) + len(self._running)

    @property
    def engine(self) -> "Engine":
        """The engine. Raises ApiError while there is none."""
        if self.state == "loading":
            raise ApiError("unavailable", f"the model is loading: {self.progress.stage}", retry_after=5)
        if self._engine is None or self.state != "ready":
            raise ApiError("unavailable", "the server is stopping", retry_after=5)
        return self._engine

    @property
    def context(self) -> int | None:
        """Tokens that a prompt and its answer may have together; None while there is no engine."""
        return None if self._engine is None else self._engine.context

    @property
    def defaults(self) -> SamplingParams:
        """Parameters of requests that set none. Raises ApiError while there is no engine."""
        return self.settings.sampling.apply_to(self.engine.sampling_defaults)

    @property
    def sampling_summary(self) -> str:
        """The sampling defaults and their source, for a log, once the model is loaded."""
        assert self._engine is not None
        summary = self.settings.sampling.summary(self._engine.sampling_defaults, "`greedy` for temperature 0")
        return f"sampling defaults: {summary}"

    def check_name(self, name: str) -> str:
        """Return the model name of a request; "" selects the default. Raises ApiError if it is unknown."""
        if name and name not in self.names:
            known = " or ".join(self.names)
            raise ApiError(
                "not_found",
                f"the model {name[:200]!r} is not served here, only {known}",
                field="model",
                code="model_not_found",
            )
        return name or self.names[0]

    async def encode(self, ask: GenerateRequest) -> list[int]:
        """The token ids of a prompt. Raises ApiError, also for parameters that the engine cannot follow."""
        return await self._encode(partial(_ids, self.engine, ask))

    async def count_tokens(self, ask: GenerateRequest) -> int:
        """Tokens of a prompt, of any length. Raises ApiError."""
        given: Any = {"raw": ask.raw, "chat_template_kwargs": ask.variables}
        return await self._encode(partial(self.engine.count_tokens, ask.prompt, **given))

    async def tokenize(self, text: str, special: bool) -> list[int]:
        """Token ids of a text of any length. Raises ApiError."""
        return await self._encode(partial(self.engine.tokenize, text, special))

    async def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included. Raises ApiError."""
        engine, known = self.engine, range(self.engine.model_info.vocabulary)
        if not all(token in known for token in ids):
            raise invalid("tokens", f"ids must be from 0 to {known[-1]}")
        return await self._encode(partial(engine.decode_with_special, ids))

    async def _encode(self, work: Callable[[], _T]) -> _T:
        """Run work of the tokenizer, which takes a tenth of a second and more for a long prompt."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._encoder, work)
        except OffspecError as error:
            fault = api_error_from(error)
            if fault.code == "context_length_exceeded":  # coding agents show a message of their own instead
                log.info("refused: %s", fault.message)
            raise fault from error

    async def answer(self, ask: GenerateRequest, *, admitted: bool = False) -> DeltaStream:
        """An answer, which waits for its turn if there are others. Raises ApiError where there will be none.

        admitted: a part of a request that waited already, which may wait however many others do.
        """
        if not admitted:
            self._check_room()
        answer = await self._encode(partial(self._prepared, self.engine, ask))
        engine = self.engine  # unless the server stops meanwhile
        if not admitted:
            self._check_room()
        self._slots = self._slots or asyncio.Semaphore(engine.sequences)
        task = self._tasks[answer] = asyncio.create_task(answer.run(self._slots))
        task.add_done_callback(lambda task: self._tasks.pop(answer))
        self._halt_abandoned()
        return answer

    def _prepared(self, engine: "Engine", ask: GenerateRequest) -> DeltaStream:
        """The answer to a request, with a seed and a format. Raises ApiError, OffspecError."""
        ids = _ids(engine, ask)
        seed = secrets.randbits(63) if ask.params.seed is None else ask.params.seed
        ask = replace(ask, params=replace(ask.params, seed=seed))
        ask = with_format(ask, ids, engine, self.settings)
        return DeltaStream(ask, ids, engine, self.metrics, self._on_disconnect)

    def _check_room(self) -> None:
        """Raises ApiError where no more requests may wait, or none are taken."""
        waiting = self.queue_length
        if waiting >= self.settings.max_queue and self._wanted:
            raise ApiError(
                "rate_limit",
                f"{waiting} requests wait already, and no more may: try again later",
                code="queue_full",
                retry_after=10,
            )

    @property
    def _wanted(self) -> list[DeltaStream]:
        return [each for each in [*self._waiting, *self._running] if not each.abandoned]

    @property
    def _abandoned(self) -> list[DeltaStream]:
        """Answers whose clients have left while the prompt is computed."""
        return [each for each in self._running if each.abandoned and not each.halt.is_set()]

    def _on_disconnect(self, answer: DeltaStream) -> None:
        """End an answer whose client has left, unless its prompt can be kept for the next request."""
        if not answer.started.is_set() or answer.prompt_computed or self.state != "ready":
            answer.halt.set()
        self._halt_abandoned()
        self._leaves += 1
        if self._abandoned:
            asyncio.get_running_loop().call_later(_FINISH_S, self._halt_abandoned_if_idle, self._leaves)

    def _halt_abandoned(self) -> None:
        """End abandoned answers, unless all other requests begin with at least half of their prompt."""
        wanted = self._wanted
        for answer in self._abandoned:
            start = answer.ids[: len(answer.ids) // 2]
            if any(other.ids[: len(start)] != start for other in wanted):
                answer.halt.set()

    def _halt_abandoned_if_idle(self, leaves: int) -> None:
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
            answer.abort(_broken_off())
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=patience)
        for answer, task in self._tasks.items():
            answer.abort(_broken_off())
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._stopped.set()
        self._encoder.shutdown(wait=False, cancel_futures=True)

    def join(self, seconds: float) -> bool:
        """Return whether the thread ended and closed the engine within this many seconds."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        try:
            engine = self._load(self._on_load_event)
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

    def _on_load_event(self, event: Event) -> None:
        """Progress of the load, from the engine's thread."""
        match event:
            case LoadProgress():
                self.progress = event
            case Notice(text=text):
                log.info("%s", text)
                self.notices.append(event)


def _ids(engine: "Engine", ask: GenerateRequest) -> list[int]:
    """The prompt of a request. Raises ApiError, OffspecError."""
    variables = ask.variables
    engine.check(ask.params)
    if ask.suffix is not None:
        assert isinstance(ask.prompt, str)
        return engine.encode_infill(ask.prompt, ask.suffix)
    return engine.encode(ask.prompt, ask.raw, variables, ask.continue_final_message)


def _broken_off() -> ApiError:
    return ApiError("unavailable", "the answer was aborted: the server is stopping", retry_after=5)
