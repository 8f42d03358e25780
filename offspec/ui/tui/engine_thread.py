"""Thread of the engine. It posts messages and never accesses widgets.

This one thread opens, runs and closes the model. It never waits for the screen: messages go to a queue, from
which a slow terminal takes several at once.
"""

import queue
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from textual.message import Message

from offspec.chat.archive import SessionArchive
from offspec.core.config import EngineConfig
from offspec.core.errors import RequestError
from offspec.core.events import Event, Finished, LoadProgress, Notice, PassStats, Prefill, Result, TextDelta
from offspec.ui import interrupt
from offspec.ui.chat.controller import ChatController
from offspec.ui.chat.setup import ChatSetup, Opener

_HANGUP = 5.0  # seconds for saving after the terminal is gone
_BETWEEN_PROGRESS = 0.1  # minimum seconds between two progress messages; a load may report every tensor


@dataclass
class EngineEvent(Message):
    """An event of a load, or of the running answer."""

    event: LoadProgress | Notice | TextDelta | PassStats


@dataclass
class Loaded(Message):
    """A model is open. notes: lines for the user, the earliest first."""

    controller: ChatController
    notes: tuple[str, ...] = ()


@dataclass
class LoadFailed(Message):
    """Loading failed, and no model is open."""

    error: BaseException


class TokensCounted(Message):
    """The tokens of the conversation were counted again."""


@dataclass
class AnswerStarted(Message):
    """An answer has begun. template_prefix: its beginning, written by the chat template."""

    template_prefix: str


@dataclass
class AnswerDone(Message):
    """An answer is over, with its result or the error that ended it."""

    result: Result | None = None
    error: BaseException | None = None


class EngineThread:
    """Thread that loads and answers, one job after the other. All methods except `close` return at once."""

    def __init__(
        self, setup: ChatSetup, opener: Opener, archive: SessionArchive, post: Callable[[Message], object]
    ) -> None:
        self._setup, self._opener, self._archive, self._post = setup, opener, archive, post
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._controller: ChatController | None = None
        self._progress_at = 0.0
        self._stage = ""
        self._thread = threading.Thread(target=self._run, name="offspec-engine", daemon=True)
        self._thread.start()

    def load(self, config: EngineConfig) -> None:
        """Open a model and continue an existing conversation with it.

        Posts `Loaded`, or `LoadFailed` if not even the previous model could be opened.
        """
        self._jobs.put(partial(self._load, config))

    def recount(self) -> None:
        """Count tokens of the conversation that were estimated. Posts `TokensCounted`."""
        self._jobs.put(self._recount)

    def answer(self, events: Generator[Event, None, None]) -> None:
        """Run an answer. Posts `AnswerDone` at its end."""
        self._jobs.put(partial(self._answer, events))

    def stop(self) -> None:
        """Stop the answer at any point. A load cannot be stopped."""
        if self._controller is not None:
            self._controller.stop()

    def close(self, timeout: float) -> bool:
        """Stop the answer, close the engine, and end. Return False if this takes over `timeout` seconds."""
        self.stop()
        self._jobs.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                job()
            if self._controller is not None:
                self._controller.close()
        except BaseException as error:  # if the thread dies, the screen must not wait for it
            self._post(LoadFailed(error))

    def _load(self, config: EngineConfig) -> None:
        controller = self._controller
        try:
            if controller is None:
                controller = ChatController.open(self._setup, self._opener, self._archive, self._on_event)
                notes = tuple(controller.notes)
            else:
                controller.reload(config, self._opener, self._on_event, self._restore_engine)
                notes = (f"the draft is {controller.engine.draft}",)
        except BaseException as error:
            self._post(LoadFailed(error))
        else:
            self._controller = controller
            self._post(Loaded(controller, notes))

    def _recount(self) -> None:
        if self._controller is not None:
            with suppress(RequestError):  # an answer of a later conversation is running
                self._controller.session.recount()
            self._post(TokensCounted())

    def _restore_engine(self, error: Exception) -> None:
        self._post(EngineEvent(Notice(f"{error}; loading the model again with its previous settings")))

    def _answer(self, events: Generator[Event, None, None]) -> None:
        result: Result | None = None
        failure: BaseException | None = None
        try:
            for event in events:
                match event:
                    case Prefill():
                        assert self._controller is not None
                        self._post(AnswerStarted(self._controller.session.opened))
                    case Notice() | TextDelta() | PassStats():
                        self._post(EngineEvent(event))
                    case Finished():
                        result = event.result
        except BaseException as error:
            failure = error
        self._post(AnswerDone(result, failure))

    def _on_event(self, event: Event) -> None:
        """Post engine events that are not part of an answer, from this thread."""
        if isinstance(event, LoadProgress):
            now = time.monotonic()
            if event.stage != self._stage or now - self._progress_at >= _BETWEEN_PROGRESS:
                self._stage, self._progress_at = event.stage, now
                self._post(EngineEvent(event))
            return
        if self._controller is not None:
            self._controller.on_event(event)
        if isinstance(event, Notice):
            self._post(EngineEvent(event))


def end_on_hangup(engine: EngineThread) -> None:
    """Have SIGHUP stop the answer, which saves it, and end the process.

    This never waits for the screen, since writing to a closed terminal may never return. A terminal that
    still exists is restored.
    """

    def end() -> None:
        engine.close(_HANGUP)
        interrupt.end_now(128 + signal.SIGHUP)  # the terminal may exist if another program sent the signal

    def hangup(signum: int, frame: object) -> None:
        threading.Thread(target=end, name="offspec-hangup", daemon=True).start()

    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores the signal
        signal.signal(signal.SIGHUP, hangup)
