"""What the user sends: questions, which are answered one after the other, and commands."""

from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path

from textual.app import App

from offspec.chat.branches import Fork
from offspec.chat.message import Message
from offspec.core.config import EngineConfig, SamplingParams
from offspec.core.errors import OffspecError, RequestError
from offspec.core.events import Event
from offspec.ui.chat import outcomes, settings, versions
from offspec.ui.chat.commands import escaped, parse
from offspec.ui.chat.controller import ChatController
from offspec.ui.chat.handlers import help_page, run_command
from offspec.ui.chat.report import report
from offspec.ui.chat.save_load import delete, rename
from offspec.ui.printable import printable
from offspec.ui.told import told
from offspec.ui.tui.answer import LEGEND, Answer, ending_of
from offspec.ui.tui.composer import Composer
from offspec.ui.tui.page_screen import PageScreen, PlanPage, help_screen
from offspec.ui.tui.sessions_screen import SessionsScreen
from offspec.ui.tui.status import StatusLine
from offspec.ui.tui.transcript_entries import Entry
from offspec.ui.tui.transcript_view import TranscriptView
from offspec.ui.tui.tree_screen import TreeScreen
from offspec.ui.tui.worker import AnswerDone, EngineThread


class UserInput:
    """Runs commands, and sends questions; what is asked meanwhile waits in the transcript, to be seen.

    controller: None while a model is loaded. answer: the one under way. stopping: it was told to stop.
    waiting: questions that were not sent. next_command: what the user wants done as soon as it has.
    """

    def __init__(
        self,
        app: App[None],
        engine: EngineThread,
        transcript: TranscriptView,
        composer: Composer,
        *,
        load: Callable[[EngineConfig], None],
        busy: Callable[[bool], None],
        show_stats: Callable[[], None],
        params: Callable[[], SamplingParams],
        defaults: Callable[[], SamplingParams],
    ) -> None:
        """busy: told when an answer begins and when it is over. show_stats: the conversation has changed.

        params: those of the conversation, also while its model is loaded. defaults: for `/set default`.
        """
        self._app, self._engine, self._transcript, self._composer = app, engine, transcript, composer
        self._load, self._busy, self._show_stats = load, busy, show_stats
        self._params, self._defaults = params, defaults
        self.waiting: list[Entry] = []
        self._settings: list[str] = []  # arguments of /set that wait for the model
        self._asked: Entry | None = None
        self._edits = False
        self._loaded = False  # once, so that the model's sampling defaults are known
        self.controller: ChatController | None = None
        self.answer: Answer | None = None
        self.stopping = False
        self.next_command = ""

    async def ask(self, text: str) -> None:
        """Send a question, with what is attached, or keep it until it can be sent."""
        text = text if self.controller is None else self.controller.compose(text)
        self.waiting.append(await self._transcript.ask(text, waiting=True))
        await self.go_on()

    def apply_settings(self) -> None:
        """Set what was set while the model was loaded."""
        assert self.controller is not None
        self._loaded = True
        if self._settings:
            self.controller.session.params = self._params_to_be()
            self._settings.clear()

    def _params_to_be(self) -> SamplingParams:
        params = self._params()
        for argument in self._settings:
            params = settings.run_set(params, argument, self._defaults())[0]
        return params

    async def go_on(self) -> None:
        """Send the question that has waited longest, if there is one and it can be sent."""
        if self.controller is None or self.answer is not None or not self.waiting:
            return
        entry = self.waiting.pop(0)
        self._transcript.send(entry)
        await self._begin(self.controller.ask(entry.text), entry)

    async def _begin(
        self, events: Generator[Event, None, None], asked: Entry | None, *, edits: bool = False
    ) -> None:
        """Run an answer. asked: its question where it is new, which comes back if it is refused.

        edits: it takes the place of what is shown no more, which comes back as well.
        """
        assert self.answer is None
        self._asked, self._edits, self.stopping = asked, edits, False
        self.answer = await self._transcript.begin_answer()
        self._engine.answer(events)
        self._busy(True)

    def stop(self) -> None:
        """Break the answer off; what came is kept."""
        self.next_command = ""
        if self.answer is not None:
            self.stopping = True
            self._engine.stop()

    async def return_waiting(self) -> None:
        """Return the questions that wait to the composer."""
        waiting, self.waiting = self.waiting, []
        for entry in waiting:
            await self._transcript.remove_entry(entry)
        if waiting:
            self._composer.prepend(escaped("\n".join(entry.text for entry in waiting)))

    async def end(self, message: AnswerDone) -> None:
        """The answer is over. After a fault nothing is sent by itself: what waited comes back."""
        answer, result, error = self.answer, message.result, message.error
        if answer is None:
            return
        self.answer, self.stopping = None, False
        self._busy(False)
        if result is not None:
            answer.finish(ending_of(result.finish_reason), self._fork())
            await self._show_kept(answer)
            return
        answer.finish(ending_of("failed"), self._fork())
        await self.return_waiting()
        if isinstance(error, RequestError):
            await self._refused(answer)
        else:
            await self._show_kept(answer)
        await self._transcript.note(_what_to_do(error), "error")

    def _fork(self) -> Fork | None:
        """The versions of the last turn, where there are several."""
        assert self.controller is not None
        session = self.controller.session
        at = len(session.messages) - 2
        return next((fork for fork in session.branches if fork.at == at), None)

    async def _show_kept(self, answer: Answer) -> None:
        """Where nothing came of a retry, the answer from before is shown again."""
        assert self.controller is not None
        messages = self.controller.session.messages
        if self._edits and printable(messages[-1].content) != answer.state.text:
            await self.show_conversation()
            await self._transcript.note("Nothing came; the answer from before is kept.", "notice")

    async def turn(self, by: int) -> None:
        """Show the version before or behind, if any, of the last turn that has several."""
        if self.controller is not None and (forks := self.controller.session.branches):
            await self.switch(forks[-1].active + by, forks[-1].at)

    async def switch(self, number: int, at: int) -> None:
        """Show a version of the turn that begins at this message, where there is such a one."""
        if self.controller is None or self.answer is not None:
            return
        fork = next((fork for fork in self.controller.session.branches if fork.at == at), None)
        if fork is not None and 0 <= number < len(fork.versions):
            await self._show(versions.switch(self.controller, fork, number), self.controller)

    async def _refused(self, answer: Answer) -> None:
        """The conversation is as it was, and so is what is shown."""
        asked = self._asked
        if asked is None or self._edits:
            await self.show_conversation()
        else:
            await self._transcript.remove_entry(self._transcript.entry_of(answer))
            await self._transcript.remove_entry(asked)
        if asked is not None:
            self._composer.prepend(f"/edit {asked.text}" if self._edits else escaped(asked.text))

    async def show_conversation(self) -> None:
        """Show the conversation from its beginning."""
        assert self.controller is not None
        session = self.controller.session
        await self.show_messages(session.messages, session.branches)
        self._show_stats()

    async def show_messages(self, messages: Sequence[Message], forks: Sequence[Fork]) -> None:
        """Show these from the first, and what waits; the arrow keys recall their questions."""
        await self._transcript.show(messages, self.waiting, forks)
        self._composer.recalled = [escaped(printable(m.content)) for m in messages if m.role == "user"]

    async def run_next_command(self) -> None:
        """Run the command that waited for the end of an answer, if one did."""
        line, self.next_command = self.next_command, ""
        if line:
            await self.command(line)

    async def command(self, line: str) -> None:
        """Run a command and show what came of it. One that is refused says why.

        The engine's thread may be ahead of the screen: an answer is over when the screen says so.
        """
        try:
            command, argument = parse(line)
            if self.controller is None:
                await self._without_a_model(command.name, argument)
            elif self.answer is None or command.while_busy:
                await self._show(run_command(self.controller, line), self.controller)
            elif self.stopping:
                self.next_command = line
            else:
                raise RequestError("stop the answer first (Esc)")
        except OffspecError as error:
            await self._transcript.note(told(error), "error")

    async def _without_a_model(self, name: str, argument: str) -> None:
        if name == "quit":
            await self._app.action_quit()
        elif name == "set":
            params, defaults = self._params_to_be(), self._defaults()
            news = settings.run_set(params, argument, defaults, loading=not self._loaded)[1]
            self._settings += [argument] if argument else []
            await self._transcript.note(news)
        elif name == "help" and argument:
            await self._transcript.note(help_page(argument, self._params_to_be()))
        elif name == "help":
            self._app.push_screen(help_screen())
        else:
            raise RequestError(f"the model is still loading; /{name} works once it is there")

    async def _show(self, outcome: outcomes.Outcome, controller: ChatController) -> None:
        match outcome:
            case outcomes.ShowText(markdown):
                await self._transcript.note(markdown)
                self._show_stats()  # the title may be another
                self._engine.recount()  # and the system message
            case outcomes.StreamAnswer(events, question, dropped):
                await self._transcript.remove_messages(dropped)
                asked = None if question is None else await self._transcript.ask(question)
                await self._begin(events, asked, edits=bool(dropped) or asked is None)
            case outcomes.Rewound(dropped):
                await self._transcript.remove_messages(dropped)
                self._show_stats()
            case outcomes.Switched(at, dropped, shown):
                forks = controller.session.branches
                await self._transcript.replace_end(dropped, shown, forks, at)
                self._show_stats()
            case outcomes.EditQuestion():
                self._composer.begin_edit(printable(outcome.line))
                self._app.query_one(StatusLine).doing("Enter asks it so; Esc leaves all as it was")
            case outcomes.Offer(reason, line):
                await self._transcript.note(reason)
                self._composer.begin_edit(line)
                self._app.query_one(StatusLine).doing("Enter sends it; Esc leaves all as it was")
            case outcomes.Reset(note):
                await self.show_conversation()
                self._engine.recount()
                await self._transcript.note(note, "notice")
            case outcomes.ShowSources(shown):
                self._transcript.show_sources(shown)
                self._app.query_one(StatusLine).doing(LEGEND if shown else "")
            case outcomes.Reload(config):
                self._load(config)
            case outcomes.Copy(text, what):
                self._app.copy_to_clipboard(text)
                await self._transcript.note(f"Copied {what}.", "notice")
            case outcomes.OpenView(view):
                self._open(view, controller)
            case outcomes.Quit():
                await self._app.action_quit()

    def _open(self, view: outcomes.View, controller: ChatController) -> None:
        match view:
            case "help":
                self._app.push_screen(help_screen())
            case "tree":
                self._app.push_screen(TreeScreen(controller.trees))
            case "stats":
                self._app.push_screen(PageScreen("Figures", report(controller)))
            case "plan":
                assert controller.engine.plan is not None
                self._app.push_screen(PageScreen("Plan", PlanPage(controller.engine.plan)))
            case "sessions":

                async def chosen(file: Path | None) -> None:
                    self._show_stats()  # the present one may have another title
                    if file is not None:
                        await self.command(f"/load {file}")

                saved = SessionsScreen(
                    controller.archive, partial(rename, controller), partial(delete, controller)
                )
                self._app.push_screen(saved, chosen)


def _what_to_do(error: BaseException | None) -> str:
    if isinstance(error, RequestError):
        return told(error)
    if isinstance(error, OffspecError):
        return f"{told(error)}\n\nWhat came is kept. `/retry` asks again, and you can go on writing."
    return f"{type(error).__name__}: {error}\n\nThis is a bug in offspec. What came is kept."
