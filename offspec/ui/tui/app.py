"""The chat app: passes user input to the engine's thread, and its messages to the widgets."""

import asyncio
import math
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import ClassVar

from rich.segment import Segment
from textual import events, on
from textual.app import App, ComposeResult, SuspendNotSupported, SystemCommand
from textual.binding import Binding, BindingType
from textual.color import Color
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.filter import LineFilter
from textual.screen import Screen

from offspec.chat.archive import SessionArchive
from offspec.chat.conversation import Conversation, Message, clean_title
from offspec.core.config import EngineConfig, SamplingParams
from offspec.core.errors import OffspecError
from offspec.core.events import LoadProgress, Notice, PassStats, TextDelta
from offspec.ui import interrupt
from offspec.ui.chat.commands import COMMANDS, is_command, unescaped
from offspec.ui.chat.completion import Completer, Completion
from offspec.ui.chat.controller import NO_MODEL, ChatController
from offspec.ui.chat.setup import ChatSetup, Opener
from offspec.ui.chat.welcome import HINTS, startup_summary
from offspec.ui.messages import user_message
from offspec.ui.printable import printable, without_controls
from offspec.ui.tui import themes
from offspec.ui.tui.answer import Answer
from offspec.ui.tui.completion import CompletionList
from offspec.ui.tui.composer import Composer
from offspec.ui.tui.engine_thread import (
    AnswerDone,
    AnswerStarted,
    EngineEvent,
    EngineThread,
    Loaded,
    LoadFailed,
    end_on_hangup,
)
from offspec.ui.tui.panel import SidePanel
from offspec.ui.tui.search import SearchBar
from offspec.ui.tui.status import Header, LoadingView, StatusLine
from offspec.ui.tui.terminal_decoder import as_paste_event
from offspec.ui.tui.terminal_notifier import TerminalNotifier, suspend
from offspec.ui.tui.transcript_view import TranscriptView
from offspec.ui.tui.user_input import UserInput

_TICK = 0.2  # seconds between updates of the status line
_STATS_TICKS = 2  # ticks between updates of the statistics during an answer
_STOPPING = 5.0  # maximum seconds that exiting waits for a pass to stop
_TWICE = 3.0  # seconds within which a second Ctrl+C exits
_IDLE = "Enter sends · / commands · F1 help"
# Actions of the chat that are disabled while another page hides it.
_OF_THE_CHAT = {
    *("stop", "interrupt", "folds", "panel", "command", "page", "end", "search", "switch"),
    "command_palette",
}


class ChatApp(App[None]):
    """Chat with one model.

    Attributes:
        engine: Thread of the engine.
        controller: Controller, None until a model is open.
        failure: Error that prevented opening a model, or None.
        user_input: Runner of questions and commands.
    """

    TITLE = "offspec chat"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]  # noqa: RUF012 - as Textual declares it
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "Stop", show=False),
        Binding("ctrl+c", "interrupt", "Stop or exit", show=False),
        Binding("ctrl+q", "quit", "Exit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", "Suspend", show=False, priority=True),
        Binding("f1", "command('/help')", "Help", show=False),
        Binding("f2", "folds", "Open or fold reasoning", show=False),
        Binding("ctrl+b", "panel", "Side panel", show=False),
        Binding("ctrl+t", "command('/tree')", "Tree", show=False),
        Binding("ctrl+o", "command('/sources')", "Token sources", show=False),
        Binding("ctrl+r", "command('/retry')", "Retry", show=False),
        Binding("ctrl+end", "end", "End of the conversation", show=False),
        Binding("ctrl+f", "search", "Search", show=False, priority=True),
        Binding("ctrl+l", "command('/clear')", "New conversation", show=False),
    ]

    def __init__(self, setup: ChatSetup, opener: Opener, archive: SessionArchive | None = None) -> None:
        super().__init__(css_path=["app.tcss", "panel.tcss"])
        self.setup, self.opener, self.archive = setup, opener, archive or SessionArchive()
        self.notices = TerminalNotifier(self, announce=setup.notify)
        self._completer = Completer(self.archive)
        self.engine: EngineThread | None = None
        self.controller: ChatController | None = None
        self.failure: BaseException | None = None
        self._leaving, self._code = False, 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._resumed: Conversation | None = None  # conversation shown before the model is loaded
        self._ticks = 0
        self._passed = False  # whether a pass has ended since the last update of the statistics
        self._interrupted_at = -math.inf

    @property
    def answer(self) -> Answer | None:
        """Running answer, or None."""
        return self.user_input.answer

    @property
    def is_loading(self) -> bool:
        return self.user_input.controller is None

    def compose(self) -> ComposeResult:
        choices = CompletionList()
        self.transcript = TranscriptView(_welcome(self.setup.config))
        self.composer = Composer(choices, self.complete)
        self.status = StatusLine(id="status")
        yield Header(self.setup.config.model)
        with Horizontal(id="middle"):
            with Vertical(id="main"):
                yield self.transcript
                yield LoadingView(self.setup.config.model)
                yield choices
            yield SidePanel()
        yield SearchBar(self.transcript, self.composer)
        yield self.status
        yield self.composer

    def on_mount(self) -> None:
        wrong_theme = themes.register(self)
        self.notices.begin()
        self.composer.focus()
        self._timer = self.set_interval(_TICK, self._tick, pause=True)
        self.engine = EngineThread(self.setup, self.opener, self.archive, self.post_message)
        self.user_input = UserInput(
            self,
            self.engine,
            self.transcript,
            self.composer,
            load=self.load,
            busy=self.set_busy,
            show_stats=self.show_stats,
            params=self.params,
            defaults=self.defaults,
        )
        end_on_hangup(self.engine)
        self._loop = asyncio.get_running_loop()
        self._loop.add_signal_handler(signal.SIGTERM, self.call_later, self._terminate, signal.SIGTERM)
        if wrong_theme:
            self.call_later(self.transcript.note, wrong_theme, "notice")
        self.status.set_status("You can type already; it is sent when the model is loaded")
        self.call_after_refresh(self._begin)  # draw the first frame before torch occupies the CPU

    def on_unmount(self) -> None:
        self.notices.end()

    def get_system_commands(self, screen: Screen[object]) -> Iterator[SystemCommand]:
        """Yield the entries of Ctrl+P: commands and themes. Commands with arguments go into the input."""
        for command in COMMANDS.values():
            write = partial(self.composer.set_text, f"/{command.name} ")
            run = partial(self.action_command, f"/{command.name}")
            yield SystemCommand(f"/{command.name}", command.help, write if command.takes_argument else run)
        for name in themes.THEMES:
            use = partial(self._use_theme, name)
            yield SystemCommand(f"{name} theme", f"Use {name} colours, now and in later chats.", use)

    async def on_event(self, event: events.Event) -> None:
        await super().on_event(as_paste_event(event))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return action not in _OF_THE_CHAT or len(self.screen_stack) == 1

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Return Textual's filters, followed by one that removes control characters."""
        return (*super().get_line_filters(), _PRINTABLE)

    def load(self, config: EngineConfig) -> None:
        """Open a model and continue the conversation with it."""
        assert self.engine is not None
        self.user_input.controller = None
        self.query_one(LoadingView).begin(config.model)
        self.engine.load(config)

    def complete(self, line: str) -> Sequence[Completion]:
        """Return the completions of a line."""
        return (self.controller or self._completer).complete(line)

    def params(self) -> SamplingParams:
        """Return the conversation's sampling parameters, also while its model is loading."""
        if self.controller is not None:
            return self.controller.session.params
        return self.defaults() if self._resumed is None else self.setup.merge_params(self._resumed.params)

    def defaults(self) -> SamplingParams:
        """Return the sampling parameters of a new conversation, with the model's once it is loaded."""
        return (
            self.setup.sampling.apply_to(SamplingParams())
            if self.controller is None
            else self.controller.defaults
        )

    # Actions of the user

    async def on_composer_submitted(self, message: Composer.Submitted) -> None:
        if is_command(message.text):
            await self.user_input.command(message.text)
        else:
            await self.user_input.ask(unescaped(message.text))
            self._show_title()

    async def action_command(self, line: str) -> None:
        await self.user_input.command(line)

    async def on_composer_version_stepped(self, message: Composer.VersionStepped) -> None:
        await self.user_input.step_version(message.by)

    def action_switch(self, number: int, at: int) -> None:
        """Show this version of the turn that begins at this message.

        Deferred, because the clicked widget waits for this handler and will be removed.
        """
        self.call_later(self.user_input.switch, number, at)

    async def action_stop(self) -> None:
        """Stop the current activity. Queued questions return to the composer."""
        if self.composer.dismiss():
            return
        if self.answer is None and self.composer.leave_edit():
            self.status.set_status(_IDLE)
            return
        if self.is_loading:
            self.status.set_status("Loading cannot be stopped; Ctrl+Q exits")
        self.user_input.stop()
        self._tick()
        await self.user_input.return_waiting()

    async def action_interrupt(self) -> None:
        if self.answer is not None and not self.user_input.stopping:
            await self.action_stop()
        elif time.monotonic() - self._interrupted_at < _TWICE:
            await self.action_quit()
        else:
            self._interrupted_at = time.monotonic()
            self.status.set_status("Press Ctrl+C again to exit")

    async def action_quit(self) -> None:
        """Exit once the running answer is stopped and saved. A second call exits at once."""
        if self._leaving or self.answer is None:
            self._leave()
            return
        self._leaving = True
        self.user_input.stop()
        self._tick()
        self.set_timer(_STOPPING, self._leave)

    def action_suspend_process(self) -> None:
        with suppress(SuspendNotSupported):
            suspend(self)

    def interrupt(self) -> None:
        """Exit on SIGINT, which no key sends here. May be called from the signal handler."""
        if self._loop is None:
            interrupt.exit_interrupted()
        else:
            self._loop.call_soon_threadsafe(self.call_later, self._terminate, signal.SIGINT)

    async def _terminate(self, by: signal.Signals) -> None:
        """Exit like Ctrl+Q, with the exit code of a program ended by a signal."""
        self._code = 128 + by
        await self.action_quit()

    def _leave(self) -> None:
        self.exit(return_code=self._code)

    def action_folds(self) -> None:
        self.transcript.toggle_folds()

    def action_panel(self) -> None:
        if self.screen.has_class("-narrow"):
            self.status.set_status("The side panel needs 100 columns; /stats shows its figures")
            return
        self.query_one(SidePanel).toggle_class("-away")
        self.show_stats()

    async def action_page(self, by: int) -> None:
        await self.transcript.scroll_pages(by)

    def on_transcript_view_end_in_view(self, message: TranscriptView.EndInView) -> None:
        self.status.set_more_below(not message.shown)

    @on(events.Click, "#below")
    def action_end(self) -> None:
        """Show the end of the conversation, and follow new text."""
        self.transcript.anchor()

    def action_search(self) -> None:
        self.query_one(SearchBar).open()

    # Messages of the engine's thread

    async def on_engine_event(self, message: EngineEvent) -> None:
        match event := message.event:
            case LoadProgress():
                self.query_one(LoadingView).update_from(event)
                self._show_loading(event)
            case Notice():
                await self.transcript.note(user_message(event), "notice")
            case TextDelta():
                if self.answer is not None:
                    self.answer.write(event.text, event.pieces)
            case PassStats():
                self._passed = True

    async def on_loaded(self, message: Loaded) -> None:
        first = self.controller is None
        self.controller = self.user_input.controller = message.controller
        self.user_input.apply_settings()
        self.query_one(LoadingView).end()
        if first:
            await self._show_first()
        for note in message.notes:
            await self.transcript.note(note, "notice")
        self.set_busy(False)
        await self.user_input.run_next_question()

    async def on_load_failed(self, message: LoadFailed) -> None:
        if self.controller is None or not isinstance(message.error, OffspecError):
            self.failure = message.error
            self.exit(return_code=1)
            return
        self.user_input.controller = self.controller
        self.user_input.apply_settings()
        self.query_one(LoadingView).end()
        await self.transcript.note(f"{user_message(message.error)}\n\n{NO_MODEL}", "error")
        await self.user_input.return_waiting()
        self.set_busy(False)

    def on_tokens_counted(self) -> None:
        self.show_stats()

    def on_answer_started(self, message: AnswerStarted) -> None:
        if self.answer is not None:
            self.answer.state.template_prefix = message.template_prefix

    def on_resize(self) -> None:
        self.call_after_refresh(self.show_stats)

    async def on_answer_done(self, message: AnswerDone) -> None:
        await self.user_input.end(message)
        if message.result is None or message.result.finish_reason != "halted":  # not stopped by the user
            self.notices.answer_ended(self._title(), failed=message.result is None)
        if self._leaving:
            self._leave()
            return
        await self.user_input.run_next_command()
        await self.user_input.run_next_question()

    # Display

    def set_busy(self, now: bool) -> None:
        """Update the display when an answer begins (True) or ends (False)."""
        if now:
            self.notices.answer_began()
            self._show_title()
            self._timer.resume()
            self._tick()
        else:
            self._timer.pause()
            self.status.set_status(_IDLE)
            self.show_stats()

    def _tick(self) -> None:
        if self.controller is None or self.answer is None:
            return
        line = self.controller.stats.live_line()
        if self._leaving:
            line = f"stopping, then exiting (Ctrl+Q exits at once) · {line}"
        elif self.user_input.stopping:
            line = f"stopping · {line}"
        self.status.set_status(line or "starting")
        self._ticks += 1
        if self._passed and self._ticks % _STATS_TICKS == 0:
            self.show_stats()

    async def _begin(self) -> None:
        """Show a resumed conversation, and load the model, which takes longer."""
        with suppress(OffspecError):  # the controller will report the same error
            file = self.setup.session_to_resume(self.archive)
            if file is not None:
                self._resumed = Conversation.read(file)
                await self.user_input.show_messages(self._resumed.messages, self._resumed.tree.forks())
        self._show_loading(None)
        self.load(self.setup.config)

    async def _show_first(self) -> None:
        """Show a resumed conversation above the notes of loading, unless it is already shown."""
        assert self.controller is not None
        resumed, now = self._resumed, self.controller.session.conversation
        if resumed is not None and _contents(resumed.messages) == _contents(now.messages):
            return
        notes = [entry for entry in self.transcript.entries if entry.kind is not None]
        await self.user_input.show_conversation()
        for note in notes:
            await self.transcript.note(note.text, note.kind or "notice")

    def _show_title(self) -> None:
        self.notices.set_title(self._title(), answering=self.answer is not None)

    def _title(self) -> str:
        """Return the title of the conversation, or its first question before there is a title."""
        talk = self._resumed if self.controller is None else self.controller.session.conversation
        asked = next((entry.text for entry in self.transcript.entries if entry.is_question), "")
        return (talk and talk.title) or clean_title(asked.strip().partition("\n")[0])

    def _use_theme(self, name: str) -> None:
        self.theme = themes.THEMES[name].name
        self.status.set_status(themes.save_default(name))

    def _show_loading(self, event: LoadProgress | None) -> None:
        """Update the side panel before the first model is loaded; later it keeps its content."""
        if self.controller is None:
            self.query_one(SidePanel).update_while_loading(self.setup.config, event, self._resumed)

    def show_stats(self) -> None:
        """Update header, side panel and context meter."""
        self._passed = False
        self._show_title()
        if self.controller is not None:
            self.query_one(Header).update_from(self.controller)
            self.query_one(SidePanel).update_from(self.controller)
            self.status.set_context(self.controller.session.used, self.controller.session.context)


class _ControlFilter(LineFilter):
    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Return the segments without control characters."""
        return [
            Segment(text if control else without_controls(text), style, control)
            for text, style, control in segments
        ]


_PRINTABLE = _ControlFilter()


def _welcome(config: EngineConfig) -> Content:
    width = max(len(what) for what, _ in HINTS)
    hints = [Content.assemble("\n", (f"{what:<{width}}", "bold"), "   ", why) for what, why in HINTS]
    return Content.assemble((printable(startup_summary(config)), "bold"), "\n", *hints)


def _contents(messages: Sequence[Message]) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in messages]
