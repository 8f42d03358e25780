"""The thread in which the engine lives. It posts messages and touches no widget.

The model is opened, asked and closed in this one thread. Nothing here waits for the screen: a message is put
in a queue, and a slow terminal finds several of them there at once.
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

from offspec.chat.archive import Archive
from offspec.core.config import EngineConfig
from offspec.core.errors import RequestError
from offspec.core.events import Event, Finished, LoadProgress, Notice, PassStats, Prefill, Result, TextDelta
from offspec.ui import interrupt
from offspec.ui.chat.controller import ChatController
from offspec.ui.chat.setup import Opener, Setup

_HANGUP = 5.0  # seconds for saving when there is no terminal any more
_BETWEEN_PROGRESS = 0.1  # seconds; a load may tell of every tensor


@dataclass
class EngineEvent(Message):
    """An event of a load, or of the answer under way."""

    event: LoadProgress | Notice | TextDelta | PassStats


@dataclass
class Loaded(Message):
    """A model is open. notes: lines that the user should read, the earliest first."""

    controller: ChatController
    notes: tuple[str, ...] = ()


@dataclass
class LoadFailed(Message):
    """No model is open."""

    error: BaseException


class Counted(Message):
    """The tokens of the conversation were counted again."""


@dataclass
class AnswerStarted(Message):
    """An answer has begun. opened: what the chat template began it with."""

    opened: str


@dataclass
class AnswerDone(Message):
    """An answer is over: with its result, or with what broke it off."""

    result: Result | None = None
    error: BaseException | None = None


class EngineThread:
    """Loads and answers, one job after the other. All methods return at once but `close`."""

    def __init__(
        self, setup: Setup, opener: Opener, archive: Archive, post: Callable[[Message], object]
    ) -> None:
        self._setup, self._opener, self._archive, self._post = setup, opener, archive, post
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._controller: ChatController | None = None
        self._progress_at = 0.0
        self._stage = ""
        self._thread = threading.Thread(target=self._run, name="offspec-engine", daemon=True)
        self._thread.start()

    def load(self, config: EngineConfig) -> None:
        """Open a model. A conversation that is under way goes on with it.

        Ends in `Loaded`; in `LoadFailed` where nothing could be opened, not even the model from before.
        """
        self._jobs.put(partial(self._load, config))

    def recount(self) -> None:
        """Count the tokens of the conversation, where they were estimated. Ends in `Counted`."""
        self._jobs.put(self._recount)

    def answer(self, events: Generator[Event, None, None]) -> None:
        """Run through an answer. Ends in `AnswerDone`."""
        self._jobs.put(partial(self._answer, events))

    def stop(self) -> None:
        """Break the answer off, whatever it is at. A load cannot be broken off."""
        if self._controller is not None:
            self._controller.stop()

    def close(self, timeout: float) -> bool:
        """Break off, close the engine, and end; False where that took longer than `timeout` seconds."""
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
        except BaseException as error:  # whatever the thread dies of, the screen must not wait for it
            self._post(LoadFailed(error))

    def _load(self, config: EngineConfig) -> None:
        controller = self._controller
        try:
            if controller is None:
                controller = ChatController.open(self._setup, self._opener, self._archive, self._on_event)
                notes = tuple(controller.notes)
            else:
                controller.reload(config, self._opener, self._on_event, self._go_back)
                notes = (f"the draft is {controller.engine.draft}",)
        except BaseException as error:
            self._post(LoadFailed(error))
        else:
            self._controller = controller
            self._post(Loaded(controller, notes))

    def _recount(self) -> None:
        if self._controller is not None:
            with suppress(RequestError):  # an answer of a later conversation is under way
                self._controller.session.recount()
            self._post(Counted())

    def _go_back(self, error: Exception) -> None:
        self._post(EngineEvent(Notice(f"{error}; loading the model as it was before")))

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
        """What the engine tells aside, from this thread."""
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
    """When the terminal goes away, break off the answer, which saves it, and end.

    Nothing here waits for the screen: with the terminal gone, writing to it may never return. Where it lives,
    it is given back.
    """

    def end() -> None:
        engine.close(_HANGUP)
        interrupt.end_now(128 + signal.SIGHUP)  # the terminal may live: another program can send this signal

    def hangup(signum: int, frame: object) -> None:
        threading.Thread(target=end, name="offspec-hangup", daemon=True).start()

    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup asked to be left alone
        signal.signal(signal.SIGHUP, hangup)
