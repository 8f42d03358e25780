"""Service that shares one engine among all APIs: its state, its queue, and running answers.

A thread loads the engine and closes it at the end. Requests get the engine's sequences in order of arrival.
Choices of one request run concurrently if several sequences are free.
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

Loader = Callable[[Callable[[Event], None]], "Engine"]  # takes a listener for progress, notices and passes
State = Literal["loading", "ready", "failed", "stopping"]
_T = TypeVar("_T")
_NOTICES = 100  # maximum number of stored notices
_FINISH_S = 60.0  # time in which an abandoned prompt is still computed, because its client may retry


class Service:
    """Engine in its own thread, with the queue of requests that it answers.

    responses: stored responses of the Responses API. ignored_names: names of ignored fields that were already
    logged. error: reason why loading failed.

    Args:
        load: Loads the engine, which the service closes at the end.
        settings: Settings of the server.
        on_failure: Called in the engine's thread if loading fails.
    """

    def __init__(
        self, load: Loader, settings: Settings, on_failure: Callable[[], None] = lambda: None
    ) -> None:
        self.settings, self.names = settings, settings.served_model_names
        self.metrics = Metrics()
        self.responses = StoredResponses(cache_root() / RESPONSES)
        self.ignored_names = set[str]()
        self.created = int(time.time())
        self.state: State = "loading"
        self.progress = LoadProgress("starting", 0, 0, "steps")
        self.notices = deque[Notice](maxlen=_NOTICES)  # the latest notices
        self.error: BaseException | None = None
        self._load, self._on_failure = load, on_failure
        self._engine: Engine | None = None
        self._slots: asyncio.Semaphore | None = None  # free sequences of the engine
        self._tasks = dict[DeltaStream, asyncio.Task[None]]()  # tasks of running and queued answers
        self._stopped = threading.Event()
        self.metrics.watch_queue(lambda: self.queue_length)
        self._disconnects = 0  # number of clients that have read their answer or disconnected
        self._encoder = ThreadPoolExecutor(1, "offspec encode")
        self._thread = threading.Thread(target=self._work, name="offspec engine", daemon=True)

    def start(self) -> None:
        """Start loading the engine."""
        self._thread.start()

    @property
    def _waiting(self) -> list[DeltaStream]:
        """Queued answers that were not halted."""
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
        """Whether the engine has been loaded."""
        return self._engine is not None

    @property
    def in_flight(self) -> int:
        """Number of running and queued requests."""
        return len(self._waiting) + len(self._running)

    @property
    def engine(self) -> "Engine":
        """The engine. Raises ApiError while it is loading, and when the server is stopping."""
        if self.state == "loading":
            raise ApiError("unavailable", f"the model is loading: {self.progress.stage}", retry_after=5)
        if self._engine is None or self.state != "ready":
            raise ApiError("unavailable", "the server is stopping", retry_after=5)
        return self._engine

    @property
    def context(self) -> int | None:
        """Maximum tokens of a prompt and its answer together; None until the engine is loaded."""
        return None if self._engine is None else self._engine.context

    @property
    def defaults(self) -> SamplingParams:
        """Default sampling parameters of requests. Raises ApiError while the engine is loading."""
        return self.settings.sampling.apply_to(self.engine.sampling_defaults)

    @property
    def sampling_summary(self) -> str:
        """Log line with the sampling defaults and their source. Available once the model is loaded."""
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

    async def encode(self, request: GenerateRequest) -> list[int]:
        """Return the token ids of a prompt. Raises ApiError for an invalid prompt or invalid parameters."""
        return await self._encode(partial(_ids, self.engine, request))

    async def count_tokens(self, request: GenerateRequest) -> int:
        """Return the number of tokens of a prompt, which may exceed the context. Raises ApiError."""
        options: Any = {"raw": request.raw, "chat_template_kwargs": request.variables}
        return await self._encode(partial(self.engine.count_tokens, request.prompt, **options))

    async def tokenize(self, text: str, special: bool) -> list[int]:
        """Return the token ids of a text, which may exceed the context. Raises ApiError.

        special: whether to add special tokens, such as the beginning-of-text token.
        """
        return await self._encode(partial(self.engine.tokenize, text, special))

    async def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens. Raises ApiError for unknown ids."""
        engine, known = self.engine, range(self.engine.model_info.vocabulary)
        if not all(token in known for token in ids):
            raise invalid("tokens", f"ids must be from 0 to {known[-1]}")
        return await self._encode(partial(engine.decode_with_special, ids))

    async def _encode(self, work: Callable[[], _T]) -> _T:
        """Run tokenizer work in a thread, because a long prompt takes a tenth of a second or more."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._encoder, work)
        except OffspecError as error:
            api_error = api_error_from(error)
            if api_error.code == "context_length_exceeded":  # coding agents do not show this message
                log.info("refused: %s", api_error.message)
            raise api_error from error

    async def answer(self, request: GenerateRequest, *, admitted: bool = False) -> DeltaStream:
        """Queue a request and return its answer. Raises ApiError if the request is invalid or refused.

        admitted: whether this is part of a request that was already admitted, so the queue limit does not
        apply.
        """
        if not admitted:
            self._check_queue()
        answer = await self._encode(partial(self._prepare, self.engine, request))
        engine = self.engine  # raises if the server has stopped meanwhile
        if not admitted:
            self._check_queue()
        self._slots = self._slots or asyncio.Semaphore(engine.sequences)
        task = self._tasks[answer] = asyncio.create_task(answer.run(self._slots))
        task.add_done_callback(lambda task: self._tasks.pop(answer))
        self._halt_abandoned()
        return answer

    def _prepare(self, engine: "Engine", request: GenerateRequest) -> DeltaStream:
        """Return the answer to a request after setting its seed and format. Raises ApiError, OffspecError."""
        ids = _ids(engine, request)
        seed = secrets.randbits(63) if request.params.seed is None else request.params.seed
        request = replace(request, params=replace(request.params, seed=seed))
        request = with_format(request, ids, engine, self.settings)
        return DeltaStream(request, ids, engine, self.metrics, self._on_disconnect)

    def _check_queue(self) -> None:
        """Raise ApiError if the queue is full."""
        waiting = self.queue_length
        if waiting >= self.settings.max_queue and self._wanted:
            raise ApiError(
                "rate_limit",
                f"the queue is full, with {waiting} requests: try again later",
                code="queue_full",
                retry_after=10,
            )

    @property
    def _wanted(self) -> list[DeltaStream]:
        return [each for each in [*self._waiting, *self._running] if not each.abandoned]

    @property
    def _abandoned(self) -> list[DeltaStream]:
        """Answers whose clients have disconnected while the prompt is being computed."""
        return [each for each in self._running if each.abandoned and not each.halt.is_set()]

    def _on_disconnect(self, answer: DeltaStream) -> None:
        """Halt the answer of a disconnected client, unless its prompt is still being computed."""
        if not answer.started.is_set() or answer.prompt_computed or self.state != "ready":
            answer.halt.set()
        self._halt_abandoned()
        self._disconnects += 1
        if self._abandoned:
            asyncio.get_running_loop().call_later(_FINISH_S, self._halt_abandoned_if_idle, self._disconnects)

    def _halt_abandoned(self) -> None:
        """Halt each abandoned answer, unless all other requests share at least half of its prompt."""
        wanted = self._wanted
        for answer in self._abandoned:
            start = answer.ids[: len(answer.ids) // 2]
            if any(other.ids[: len(start)] != start for other in wanted):
                answer.halt.set()

    def _halt_abandoned_if_idle(self, disconnects: int) -> None:
        """Halt abandoned answers if no client is waiting.

        disconnects: value of the counter when this call was scheduled. If another client has disconnected
        since then, a later call halts the answers instead.
        """
        if not self._wanted and disconnects == self._disconnects:
            for answer in self._abandoned:
                answer.halt.set()

    async def stop(self, patience: float) -> None:
        """Refuse new and queued requests, and abort running answers that do not finish in time.

        The engine's thread then closes the engine and ends. patience: seconds for running answers to finish.
        """
        self.state = "stopping" if self.state != "failed" else "failed"
        for answer in [*self._waiting, *self._abandoned]:
            answer.abort(_stopping_error())
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=patience)
        for answer, task in self._tasks.items():
            answer.abort(_stopping_error())
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
        except BaseException as error:  # reported by the code that started the service
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
        """Record a loading event. Called in the engine's thread."""
        match event:
            case LoadProgress():
                self.progress = event
            case Notice(text=text):
                log.info("%s", text)
                self.notices.append(event)


def _ids(engine: "Engine", request: GenerateRequest) -> list[int]:
    """Return the token ids of a request's prompt. Raises ApiError, OffspecError."""
    variables = request.variables
    engine.check(request.params)
    if request.suffix is not None:
        assert isinstance(request.prompt, str)
        return engine.encode_infill(request.prompt, request.suffix)
    return engine.encode(request.prompt, request.raw, variables, request.continue_final_message)


def _stopping_error() -> ApiError:
    return ApiError("unavailable", "the answer was aborted: the server is stopping", retry_after=5)
