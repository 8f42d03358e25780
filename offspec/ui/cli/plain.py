"""The line mode of `offspec chat`: a question a line, answers on stdout, everything else on stderr."""

import math
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, closing, nullcontext, suppress

import typer

from offspec.chat.archive import Archive
from offspec.chat.conversation import Conversation
from offspec.core.config import EngineConfig
from offspec.core.errors import OffspecError
from offspec.core.events import Event, Finished, LoadProgress, Notice, Result, TextDelta
from offspec.ui import interrupt
from offspec.ui.chat import outcomes
from offspec.ui.chat.controller import NO_MODEL, ChatController
from offspec.ui.chat.handlers import run_command
from offspec.ui.chat.setup import Opener, Setup
from offspec.ui.chat.welcome import HINTS, opening
from offspec.ui.cli.plain_input import PlainInput
from offspec.ui.cli.plain_render import PlainRenderer, page
from offspec.ui.printable import printable
from offspec.ui.told import told

_TWICE = 3.0  # seconds in which a second Ctrl-C leaves


def run(setup: Setup, opener: Opener, archive: Archive, *, quiet: bool = False) -> None:
    """Chat until the input ends or the user leaves. quiet: only answers, errors, and what was asked for.

    Raises OffspecError where the model cannot be loaded, KeyboardInterrupt, and typer.Exit where a question
    of a pipe failed.
    """
    mode = _LineMode(setup, opener, archive, PlainRenderer(quiet=quiet))
    try:
        mode.open()
        mode.chat()
    finally:
        mode.close()


class _Discarded(KeyboardInterrupt):
    """The line that was being typed is not wanted."""


def _on_interrupt(do: Callable[[], None]) -> AbstractContextManager[None]:
    """What Ctrl-C does in a block. Only the main thread hears of it."""
    is_main = threading.current_thread() is threading.main_thread()
    return interrupt.instead(do) if is_main else nullcontext()


class _LineMode:
    def __init__(self, setup: Setup, opener: Opener, archive: Archive, renderer: PlainRenderer) -> None:
        self._setup, self._opener, self._archive, self._renderer = setup, opener, archive, renderer
        self._controller: ChatController | None = None
        self._input = PlainInput(
            lambda line: [completion.text for completion in self.controller.complete(line)]
        )
        self._begun = ""  # a question to edit
        self._failure: OffspecError | None = None
        self._told = 0  # notes of the controller that were shown
        self._interrupted = False
        self._discarded_at = -math.inf

    @property
    def controller(self) -> ChatController:
        assert self._controller is not None
        return self._controller

    def open(self) -> None:
        """Load the model and lay out the conversation, whose end is shown before."""
        if self._input.is_terminal:
            self._greet()
        try:
            self._controller = ChatController.open(self._setup, self._opener, self._archive, self._on_event)
        finally:
            self._renderer.live.stop()
        if self._input.is_terminal:
            draft = self._controller.engine.draft
            drafted = "without a draft" if draft == "none" else f"drafted by {draft}"
            self._renderer.note(f"{self._setup.config.model}, {drafted}. /help lists the commands.")

    def _greet(self) -> None:
        """What is loaded and resumed, or what to try."""
        with suppress(OffspecError):  # the controller finds the same, and says so
            file = self._setup.resumed(self._archive)
            if file is not None:
                self._renderer.end_of(Conversation.read(file))
            else:
                for what, why in HINTS[1:]:
                    self._renderer.note(f"{what}: {why}")
        self._renderer.note(f"loading {opening(self._setup.config)}")

    def chat(self) -> None:
        """Take questions and commands until there are no more."""
        while True:
            self._tell_notes()
            try:
                begun, self._begun = self._begun, ""
                with self._leaving_at_second():
                    typed = self._input.read(begun)
                if typed is None:
                    break
                self._discarded_at = -math.inf  # the user goes on
                if not typed.text.strip():
                    continue
                if typed.is_command:
                    outcome = run_command(self.controller, typed.text)
                else:
                    question = self.controller.compose(typed.text)
                    outcome = outcomes.StreamAnswer(self.controller.ask(question), question)
            except _Discarded:
                self._renderer.note("Press Ctrl-C again to leave, or Ctrl-D.")
                continue
            except OffspecError as error:
                self._complain(error)
                continue
            if isinstance(outcome, outcomes.Quit):
                break
            self._do(outcome)
        if self._failure is not None and not self._input.is_terminal:
            raise typer.Exit(self._failure.exit_code)

    def close(self) -> None:
        self._renderer.live.stop()
        if self._controller is not None:
            self._controller.close()
            if self._input.is_terminal and (line := self._controller.resume_line()):
                self._renderer.note(line)

    def _do(self, outcome: outcomes.Outcome) -> None:
        match outcome:
            case outcomes.StreamAnswer():
                self._answer(outcome.events)
            case outcomes.ShowText():
                self._renderer.page(outcome.markdown)
            case outcomes.Rewound(dropped):
                turns = sum(message.role == "user" for message in dropped)
                self._renderer.page(
                    "Took back the last question." if turns == 1 else f"Took back {turns} questions."
                )
            case outcomes.Switched():
                said = "\n\n".join(message.content for message in outcome.shown)
                self._renderer.page(f"Version {outcome.which}:\n\n{said}")
            case outcomes.EditQuestion(question, line):
                if self._input.edits:
                    self._begun = printable(line)  # readline shows it as it is
                else:
                    self._renderer.page(f"`/edit TEXT` asks this question differently:\n\n{question}")
            case outcomes.Offer(reason, line):
                self._renderer.page(reason)
                self._begun = line if self._input.edits else ""
            case outcomes.Reset():
                self.controller.session.recount()
                self._renderer.page(outcome.note)
            case outcomes.OpenView(view):
                self._show(view)
            case outcomes.ShowSources():
                self._renderer.sources = outcome.shown
                self._renderer.page(
                    "Tokens that the target added are underlined, on a terminal."
                    if outcome.shown
                    else "Plain text."
                )
            case outcomes.Reload():
                self._reload(outcome.config)
            case outcomes.Copy():
                self._copy(outcome)

    def _show(self, view: outcomes.View) -> None:
        if view == "plan":
            assert self.controller.engine.plan is not None
            self._renderer.plan(self.controller.engine.plan)
        else:
            self._renderer.page(page(view, self.controller))

    def _copy(self, outcome: outcomes.Copy) -> None:
        try:
            self._renderer.copy(outcome.text)
        except OffspecError as error:
            self._complain(error)
        else:
            self._renderer.page(f"Copied {outcome.what}.")

    def _answer(self, events: Generator[Event, None, None]) -> None:
        """Show an answer as it comes. What cannot be written ends the chat; any other failure does not."""
        result: Result | None = None
        failure: OffspecError | None = None
        self._interrupted = False
        with self._stoppable(), closing(events):
            while True:
                try:
                    event = next(events, None)
                except OffspecError as error:
                    failure = error
                    break
                if event is None:
                    break
                if isinstance(event, TextDelta):
                    self._renderer.text(event)
                elif isinstance(event, Finished):
                    result = event.result
                elif isinstance(event, Notice) and event.urgent:
                    self._renderer.urge(told(event))
                self._move()
        self._renderer.end_answer(result)
        if failure is not None:
            self._complain(failure)
        if self._interrupted and not self._input.is_terminal:
            raise interrupt.interrupted()  # the input is a pipe: there is no one to ask anything else

    def _stoppable(self) -> AbstractContextManager[None]:
        """Ctrl-C stops the answer, and a second one while it stops leaves."""

        def stop() -> None:
            self._interrupted = True
            self.controller.stop()

        return _on_interrupt(stop)

    def _leaving_at_second(self) -> AbstractContextManager[None]:
        """Ctrl-C at a terminal's prompt discards the line, and a second one soon after leaves.

        Raises _Discarded, KeyboardInterrupt.
        """

        def discard() -> None:
            before, self._discarded_at = self._discarded_at, time.monotonic()
            raise interrupt.interrupted() if self._discarded_at - before < _TWICE else _Discarded()

        return _on_interrupt(discard) if self._input.is_terminal else nullcontext()

    def _reload(self, config: EngineConfig) -> None:
        """Exchange the engine, or load the one from before again where that fails."""

        def failed(error: Exception) -> None:
            self._renderer.complain(error)
            if isinstance(error, OffspecError):
                self._failure = error
            self._renderer.note("loading the model as it was before")

        try:
            self.controller.reload(config, self._opener, self._on_event, failed)
        except OffspecError as error:
            self._complain(error)
            self._renderer.note(NO_MODEL)
            return
        finally:
            self._renderer.live.stop()
        self._renderer.page(f"The draft is {self.controller.engine.draft}.")

    def _on_event(self, event: Event) -> None:
        """What the engine tells aside, in this thread."""
        if isinstance(event, LoadProgress):
            self._renderer.live.progress(event)
        elif self._controller is not None:
            self._controller.on_event(event)
            self._move()
        elif isinstance(event, Notice):
            self._renderer.note(told(event))

    def _move(self) -> None:
        self._renderer.moving(self.controller.stats.live_line())

    def _tell_notes(self) -> None:
        notes = self.controller.notes[self._told :]
        self._told += len(notes)
        for note in notes:
            self._renderer.note(note)

    def _complain(self, error: OffspecError) -> None:
        self._failure = error
        self._renderer.complain(error)
