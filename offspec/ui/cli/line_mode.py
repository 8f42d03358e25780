"""Line mode of `offspec chat`: one question per line, answers on stdout, everything else on stderr."""

import math
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, closing, nullcontext, suppress

import typer

from offspec.chat.archive import SessionArchive
from offspec.chat.conversation import Conversation
from offspec.core.config import EngineConfig
from offspec.core.errors import OffspecError
from offspec.core.events import Event, Finished, LoadProgress, Notice, Result, TextDelta
from offspec.ui import interrupt
from offspec.ui.chat import command_results
from offspec.ui.chat.controller import NO_MODEL, ChatController
from offspec.ui.chat.handlers import run_command
from offspec.ui.chat.setup import ChatSetup, Opener
from offspec.ui.chat.welcome import HINTS, startup_summary
from offspec.ui.cli.line_input import LineInput
from offspec.ui.cli.line_renderer import LineRenderer, page
from offspec.ui.messages import user_message
from offspec.ui.printable import printable

_TWICE = 3.0  # seconds within which a second Ctrl-C exits


def run(setup: ChatSetup, opener: Opener, archive: SessionArchive, *, quiet: bool = False) -> None:
    """Chat until the input ends or the user exits.

    Raises OffspecError if the model cannot be loaded, KeyboardInterrupt, and typer.Exit if a question from a
    pipe failed.

    quiet: whether to print only answers, errors, and output of commands.
    """
    mode = _LineMode(setup, opener, archive, LineRenderer(quiet=quiet))
    try:
        mode.open()
        mode.chat()
    finally:
        mode.close()


class _LineDiscarded(KeyboardInterrupt):
    """The user discarded the current input line."""


def _on_interrupt(do: Callable[[], None]) -> AbstractContextManager[None]:
    """Have Ctrl-C call `do` in a block. Only the main thread receives signals."""
    is_main = threading.current_thread() is threading.main_thread()
    return interrupt.override_handler(do) if is_main else nullcontext()


class _LineMode:
    def __init__(
        self, setup: ChatSetup, opener: Opener, archive: SessionArchive, renderer: LineRenderer
    ) -> None:
        self._setup, self._opener, self._archive, self._renderer = setup, opener, archive, renderer
        self._controller: ChatController | None = None
        self._input = LineInput(
            lambda line: [completion.text for completion in self.controller.complete(line)]
        )
        self._begun = ""  # a question to edit
        self._failure: OffspecError | None = None
        self._notes_shown = 0  # number of the controller's notes shown so far
        self._interrupted = False
        self._discarded_at = -math.inf

    @property
    def controller(self) -> ChatController:
        assert self._controller is not None
        return self._controller

    def open(self) -> None:
        """Show the end of a resumed conversation, load the model, and prepare the conversation."""
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
        """Show what is loaded and resumed, or hints."""
        with suppress(OffspecError):  # the controller will report the same error
            file = self._setup.session_to_resume(self._archive)
            if file is not None:
                self._renderer.end_of(Conversation.read(file))
            else:
                for what, why in HINTS[1:]:
                    self._renderer.note(f"{what}: {why}")
        self._renderer.note(f"loading {startup_summary(self._setup.config)}")

    def chat(self) -> None:
        """Process questions and commands until the input ends."""
        while True:
            self._show_notes()
            try:
                begun, self._begun = self._begun, ""
                with self._second_interrupt_exits():
                    typed = self._input.read(begun)
                if typed is None:
                    break
                self._discarded_at = -math.inf  # the user continues
                if not typed.text.strip():
                    continue
                if typed.is_command:
                    outcome = run_command(self.controller, typed.text)
                else:
                    question = self.controller.build_question(typed.text)
                    outcome = command_results.StreamAnswer(self.controller.ask(question), question)
            except _LineDiscarded:
                self._renderer.note("Press Ctrl-C again to exit, or Ctrl-D.")
                continue
            except OffspecError as error:
                self._print_error(error)
                continue
            if isinstance(outcome, command_results.Quit):
                break
            self._show_outcome(outcome)
        if self._failure is not None and not self._input.is_terminal:
            raise typer.Exit(self._failure.exit_code)

    def close(self) -> None:
        self._renderer.live.stop()
        if self._controller is not None:
            self._controller.close()
            if self._input.is_terminal and (line := self._controller.resume_command()):
                self._renderer.note(line)

    def _show_outcome(self, outcome: command_results.CommandResult) -> None:
        match outcome:
            case command_results.StreamAnswer():
                self._answer(outcome.events)
            case command_results.ShowText():
                self._renderer.page(outcome.markdown)
            case command_results.TurnsRemoved(dropped):
                turns = sum(message.role == "user" for message in dropped)
                self._renderer.page(
                    "Removed the last question." if turns == 1 else f"Removed the last {turns} questions."
                )
            case command_results.BranchSwitched():
                shown = "\n\n".join(message.content for message in outcome.shown)
                self._renderer.page(f"Version {outcome.which}:\n\n{shown}")
            case command_results.EditQuestion(question, line):
                if self._input.edits:
                    self._begun = printable(line)  # readline does not escape control characters
                else:
                    self._renderer.page(f"`/edit TEXT` replaces this question:\n\n{question}")
            case command_results.SuggestCommand(reason, line):
                self._renderer.page(reason)
                self._begun = line if self._input.edits else ""
            case command_results.NewConversation():
                self.controller.session.recount()
                self._renderer.page(outcome.note)
            case command_results.OpenView(view):
                self._show(view)
            case command_results.ShowSources():
                self._renderer.sources = outcome.shown
                self._renderer.page(
                    "Bonus tokens of the target are underlined on a terminal."
                    if outcome.shown
                    else "Plain text."
                )
            case command_results.Reload():
                self._reload(outcome.config)
            case command_results.CopyToClipboard():
                self._copy(outcome)

    def _show(self, view: command_results.View) -> None:
        if view == "plan":
            assert self.controller.engine.plan is not None
            self._renderer.plan(self.controller.engine.plan)
        else:
            self._renderer.page(page(view, self.controller))

    def _copy(self, outcome: command_results.CopyToClipboard) -> None:
        try:
            self._renderer.copy(outcome.text)
        except OffspecError as error:
            self._print_error(error)
        else:
            self._renderer.page(f"Copied {outcome.what}.")

    def _answer(self, events: Generator[Event, None, None]) -> None:
        """Stream an answer. A write error ends the chat; other errors do not."""
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
                    self._renderer.warn(user_message(event))
                self._update_status()
        self._renderer.end_answer(result)
        if failure is not None:
            self._print_error(failure)
        if self._interrupted and not self._input.is_terminal:
            raise interrupt.pending_interrupt()  # the input is a pipe: nobody is there to continue

    def _stoppable(self) -> AbstractContextManager[None]:
        """Have Ctrl-C stop the answer, and a second Ctrl-C meanwhile exit."""

        def stop() -> None:
            self._interrupted = True
            self.controller.stop()

        return _on_interrupt(stop)

    def _second_interrupt_exits(self) -> AbstractContextManager[None]:
        """Have Ctrl-C at a terminal's prompt discard the line, and a second one soon after exit.

        Raises _LineDiscarded, KeyboardInterrupt.
        """

        def discard() -> None:
            before, self._discarded_at = self._discarded_at, time.monotonic()
            raise interrupt.pending_interrupt() if self._discarded_at - before < _TWICE else _LineDiscarded()

        return _on_interrupt(discard) if self._input.is_terminal else nullcontext()

    def _reload(self, config: EngineConfig) -> None:
        """Replace the engine, or reload the previous one if that fails."""

        def failed(error: Exception) -> None:
            self._renderer.error(error)
            if isinstance(error, OffspecError):
                self._failure = error
            self._renderer.note("loading the model again with its previous settings")

        try:
            self.controller.reload(config, self._opener, self._on_event, failed)
        except OffspecError as error:
            self._print_error(error)
            self._renderer.note(NO_MODEL)
            return
        finally:
            self._renderer.live.stop()
        self._renderer.page(f"The draft is {self.controller.engine.draft}.")

    def _on_event(self, event: Event) -> None:
        """Handle an event that the engine reports outside of an answer, in this thread."""
        if isinstance(event, LoadProgress):
            self._renderer.live.progress(event)
        elif self._controller is not None:
            self._controller.on_event(event)
            self._update_status()
        elif isinstance(event, Notice):
            self._renderer.note(user_message(event))

    def _update_status(self) -> None:
        self._renderer.status(self.controller.stats.live_line())

    def _show_notes(self) -> None:
        notes = self.controller.notes[self._notes_shown :]
        self._notes_shown += len(notes)
        for note in notes:
            self._renderer.note(note)

    def _print_error(self, error: OffspecError) -> None:
        self._failure = error
        self._renderer.error(error)
