"""The chat as an app: what is typed goes to the engine's thread, and what that tells goes to the widgets."""

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

from offspec.chat.archive import Archive
from offspec.chat.conversation import Conversation, Message, clean_title
from offspec.core.config import EngineConfig, SamplingParams
from offspec.core.errors import OffspecError
from offspec.core.events import LoadProgress, Notice, PassStats, TextDelta
from offspec.ui import interrupt
from offspec.ui.chat.commands import COMMANDS, is_command, unescaped
from offspec.ui.chat.completion import Completer, Completion
from offspec.ui.chat.controller import NO_MODEL, ChatController
from offspec.ui.chat.setup import Opener, Setup
from offspec.ui.chat.welcome import HINTS, opening
from offspec.ui.printable import printable, without_controls
from offspec.ui.told import told
from offspec.ui.tui import themes
from offspec.ui.tui.answer import Answer
from offspec.ui.tui.completion import CompletionList
from offspec.ui.tui.composer import Composer
from offspec.ui.tui.notices import Notices, suspend
from offspec.ui.tui.panel import SidePanel
from offspec.ui.tui.search import SearchBar
from offspec.ui.tui.status import Header, LoadingView, StatusLine
from offspec.ui.tui.transcript_view import TranscriptView
from offspec.ui.tui.typed_text import as_text
from offspec.ui.tui.user_input import UserInput
from offspec.ui.tui.worker import (
    AnswerDone,
    AnswerStarted,
    EngineEvent,
    EngineThread,
    Loaded,
    LoadFailed,
    end_on_hangup,
)

_TICK = 0.2  # seconds; nothing moves by itself more often
_STATS_TICKS = 2  # from one look at the statistics to the next, while passes come
_STOPPING = 5.0  # seconds that leaving waits for a pass to be broken off
_TWICE = 3.0  # seconds in which a second Ctrl+C leaves
_IDLE = "Enter sends · / commands · F1 help"
# While another page is open they would act on what is not seen.
_OF_THE_CHAT = {
    *("stop", "interrupt", "folds", "panel", "command", "page", "end", "search", "switch"),
    "command_palette",
}


class ChatApp(App[None]):
    """A chat with one model.

    engine: its thread. controller: None until a model is open. failure: why none could be opened. user_input:
    the answer under way and the questions that wait.
    """

    TITLE = "offspec chat"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]  # noqa: RUF012 - as Textual declares it
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "Stop", show=False),
        Binding("ctrl+c", "interrupt", "Stop or leave", show=False),
        Binding("ctrl+q", "quit", "Leave", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", "Suspend", show=False, priority=True),
        Binding("f1", "command('/help')", "Help", show=False),
        Binding("f2", "folds", "Open or fold thinking", show=False),
        Binding("ctrl+b", "panel", "Side panel", show=False),
        Binding("ctrl+t", "command('/tree')", "Tree", show=False),
        Binding("ctrl+o", "command('/sources')", "Colours of tokens", show=False),
        Binding("ctrl+r", "command('/retry')", "Retry", show=False),
        Binding("ctrl+end", "end", "End of the conversation", show=False),
        Binding("ctrl+f", "search", "Search", show=False, priority=True),
        Binding("ctrl+l", "command('/clear')", "New conversation", show=False),
    ]

    def __init__(self, setup: Setup, opener: Opener, archive: Archive | None = None) -> None:
        super().__init__(css_path=["app.tcss", "panel.tcss"])
        self.setup, self.opener, self.archive = setup, opener, archive or Archive()
        self.notices = Notices(self, announce=setup.notify)
        self._completer = Completer(self.archive)
        self.engine: EngineThread | None = None
        self.controller: ChatController | None = None
        self.failure: BaseException | None = None
        self._leaving, self._code = False, 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._resumed: Conversation | None = None  # as it was shown before there was a model
        self._ticks = 0
        self._passed = False  # a pass has ended since the statistics were shown
        self._interrupted_at = -math.inf

    @property
    def answer(self) -> Answer | None:
        """The one under way."""
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
            busy=self.busy,
            show_stats=self.show_stats,
            params=self.params,
            defaults=self.defaults,
        )
        end_on_hangup(self.engine)
        self._loop = asyncio.get_running_loop()
        self._loop.add_signal_handler(signal.SIGTERM, self.call_later, self._terminate, signal.SIGTERM)
        if wrong_theme:
            self.call_later(self.transcript.note, wrong_theme, "notice")
        self.status.doing("You can write already; it is sent when the model is there")
        self.call_after_refresh(self._begin)  # the first frame before torch takes the processor

    def on_unmount(self) -> None:
        self.notices.end()

    def get_system_commands(self, screen: Screen[object]) -> Iterator[SystemCommand]:
        """What Ctrl+P lists: our own commands and themes. One that takes something goes into the input."""
        for command in COMMANDS.values():
            write = partial(self.composer.set_text, f"/{command.name} ")
            run = partial(self.action_command, f"/{command.name}")
            yield SystemCommand(f"/{command.name}", command.help, write if command.takes_argument else run)
        for name in themes.THEMES:
            use = partial(self._use_theme, name)
            yield SystemCommand(f"{name} theme", f"Use {name} colours, also the next time.", use)

    async def on_event(self, event: events.Event) -> None:
        await super().on_event(as_text(event))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return action not in _OF_THE_CHAT or len(self.screen_stack) == 1

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Those of Textual, and behind them one for what was not made printable before."""
        return (*super().get_line_filters(), _PRINTABLE)

    def load(self, config: EngineConfig) -> None:
        """Open a model; the conversation goes on with it."""
        assert self.engine is not None
        self.user_input.controller = None
        self.query_one(LoadingView).begin(config.model)
        self.engine.load(config)

    def complete(self, line: str) -> Sequence[Completion]:
        """What a line may become."""
        return (self.controller or self._completer).complete(line)

    def params(self) -> SamplingParams:
        """How answers are chosen, also where the model of the conversation is being loaded."""
        if self.controller is not None:
            return self.controller.session.params
        return self.defaults() if self._resumed is None else self.setup.params_over(self._resumed.params)

    def defaults(self) -> SamplingParams:
        """The sampling parameters of a new conversation. Those of the model come when it is loaded."""
        return (
            self.setup.sampling.over(SamplingParams())
            if self.controller is None
            else self.controller.defaults
        )

    # What the user does

    async def on_composer_sent(self, message: Composer.Sent) -> None:
        if is_command(message.text):
            await self.user_input.command(message.text)
        else:
            await self.user_input.ask(unescaped(message.text))
            self._show_title()

    async def action_command(self, line: str) -> None:
        await self.user_input.command(line)

    async def on_composer_turned(self, message: Composer.Turned) -> None:
        await self.user_input.turn(message.by)

    def action_switch(self, number: int, at: int) -> None:
        """Show this version of the turn that begins at this message.

        Later: the widget that was clicked waits for this, and is to be removed.
        """
        self.call_later(self.user_input.switch, number, at)

    async def action_stop(self) -> None:
        """Stop what is under way. Questions that waited for its end come back."""
        if self.composer.dismiss():
            return
        if self.answer is None and self.composer.leave_edit():
            self.status.doing(_IDLE)
            return
        if self.is_loading:
            self.status.doing("A load cannot be broken off; Ctrl+Q leaves")
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
            self.status.doing("Press Ctrl+C again to leave")

    async def action_quit(self) -> None:
        """Leave, once the answer under way has been broken off and saved. A second time: at once."""
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
        """SIGINT, which comes from no key here: leave. May be called from the handler of the signal."""
        if self._loop is None:
            interrupt.leave()
        else:
            self._loop.call_soon_threadsafe(self.call_later, self._terminate, signal.SIGINT)

    async def _terminate(self, by: signal.Signals) -> None:
        """Leave as after Ctrl+Q, with the exit code of a program that a signal ended."""
        self._code = 128 + by
        await self.action_quit()

    def _leave(self) -> None:
        self.exit(return_code=self._code)

    def action_folds(self) -> None:
        self.transcript.toggle_folds()

    def action_panel(self) -> None:
        if self.screen.has_class("-narrow"):
            self.status.doing("The side panel needs 100 columns; /stats shows its figures")
            return
        self.query_one(SidePanel).toggle_class("-away")
        self.show_stats()

    async def action_page(self, by: int) -> None:
        await self.transcript.page(by)

    def on_transcript_view_end_in_view(self, message: TranscriptView.EndInView) -> None:
        self.status.more_below(not message.shown)

    @on(events.Click, "#below")
    def action_end(self) -> None:
        """Show the end of the conversation, and follow what comes."""
        self.transcript.anchor()

    def action_search(self) -> None:
        self.query_one(SearchBar).open()

    # What the engine's thread tells

    async def on_engine_event(self, message: EngineEvent) -> None:
        match event := message.event:
            case LoadProgress():
                self.query_one(LoadingView).update_from(event)
                self._show_loading(event)
            case Notice():
                await self.transcript.note(told(event), "notice")
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
        self.busy(False)
        await self.user_input.go_on()

    async def on_load_failed(self, message: LoadFailed) -> None:
        if self.controller is None or not isinstance(message.error, OffspecError):
            self.failure = message.error
            self.exit(return_code=1)
            return
        self.user_input.controller = self.controller
        self.user_input.apply_settings()
        self.query_one(LoadingView).end()
        await self.transcript.note(f"{told(message.error)}\n\n{NO_MODEL}", "error")
        await self.user_input.return_waiting()
        self.busy(False)

    def on_counted(self) -> None:
        self.show_stats()

    def on_answer_started(self, message: AnswerStarted) -> None:
        if self.answer is not None:
            self.answer.state.opened = message.opened

    def on_resize(self) -> None:
        self.call_after_refresh(self.show_stats)

    async def on_answer_done(self, message: AnswerDone) -> None:
        await self.user_input.end(message)
        if message.result is None or message.result.finish_reason != "halted":  # as the user wanted
            self.notices.answer_ended(self._title(), failed=message.result is None)
        if self._leaving:
            self._leave()
            return
        await self.user_input.run_next_command()
        await self.user_input.go_on()

    # What the screen shows

    def busy(self, now: bool) -> None:
        """An answer begins, or is over."""
        if now:
            self.notices.answer_began()
            self._show_title()
            self._timer.resume()
            self._tick()
        else:
            self._timer.pause()
            self.status.doing(_IDLE)
            self.show_stats()

    def _tick(self) -> None:
        if self.controller is None or self.answer is None:
            return
        line = self.controller.stats.live_line()
        if self._leaving:
            line = f"stopping, then leaving (Ctrl+Q leaves at once) · {line}"
        elif self.user_input.stopping:
            line = f"stopping · {line}"
        self.status.doing(line or "starting")
        self._ticks += 1
        if self._passed and self._ticks % _STATS_TICKS == 0:
            self.show_stats()

    async def _begin(self) -> None:
        """Show what is resumed, and load the model, which takes longer."""
        with suppress(OffspecError):  # the controller finds the same, and says so
            file = self.setup.resumed(self.archive)
            if file is not None:
                self._resumed = Conversation.read(file)
                await self.user_input.show_messages(self._resumed.messages, self._resumed.tree.forks())
        self._show_loading(None)
        self.load(self.setup.config)

    async def _show_first(self) -> None:
        """What is resumed, above what the program has said while it loaded, where it is not shown already."""
        assert self.controller is not None
        resumed, now = self._resumed, self.controller.session.conversation
        if resumed is not None and _said(resumed.messages) == _said(now.messages):
            return
        notes = [entry for entry in self.transcript.entries if entry.kind is not None]
        await self.user_input.show_conversation()
        for note in notes:
            await self.transcript.note(note.text, note.kind or "notice")

    def _show_title(self) -> None:
        self.notices.title(self._title(), answering=self.answer is not None)

    def _title(self) -> str:
        """The title of the conversation, which has none before its first answer: then its first question."""
        talk = self._resumed if self.controller is None else self.controller.session.conversation
        asked = next((entry.text for entry in self.transcript.entries if entry.is_question), "")
        return (talk and talk.title) or clean_title(asked.strip().partition("\n")[0])

    def _use_theme(self, name: str) -> None:
        self.theme = themes.THEMES[name].name
        self.status.doing(themes.remember(name))

    def _show_loading(self, event: LoadProgress | None) -> None:
        """The side panel before there is a model; later it keeps what it shows."""
        if self.controller is None:
            self.query_one(SidePanel).update_while_loading(self.setup.config, event, self._resumed)

    def show_stats(self) -> None:
        """Header, side panel and meter, as the controller has them now."""
        self._passed = False
        self._show_title()
        if self.controller is not None:
            self.query_one(Header).update_from(self.controller)
            self.query_one(SidePanel).update_from(self.controller)
            self.status.context(self.controller.session.used, self.controller.session.context)


class _Printable(LineFilter):
    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """The same segments without what a terminal would obey."""
        return [
            Segment(text if control else without_controls(text), style, control)
            for text, style, control in segments
        ]


_PRINTABLE = _Printable()


def _welcome(config: EngineConfig) -> Content:
    width = max(len(what) for what, _ in HINTS)
    hints = [Content.assemble("\n", (f"{what:<{width}}", "bold"), "   ", why) for what, why in HINTS]
    return Content.assemble((printable(opening(config)), "bold"), "\n", *hints)


def _said(messages: Sequence[Message]) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in messages]
