"""Handling of user input: questions, answered one after the other, and commands."""

from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path

from textual.app import App

from offspec.chat.branches import Fork
from offspec.chat.message import Message
from offspec.core.config import EngineConfig, SamplingParams
from offspec.core.errors import OffspecError, RequestError
from offspec.core.events import Event
from offspec.ui.chat import branch_commands, command_results, settings
from offspec.ui.chat.commands import escaped, parse
from offspec.ui.chat.controller import ChatController
from offspec.ui.chat.handlers import help_page, run_command
from offspec.ui.chat.report import report
from offspec.ui.chat.save_load import delete, rename
from offspec.ui.messages import user_message
from offspec.ui.printable import printable
from offspec.ui.tui.answer import LEGEND, Answer, ending_line
from offspec.ui.tui.composer import Composer
from offspec.ui.tui.engine_thread import AnswerDone, EngineThread
from offspec.ui.tui.page_screen import PageScreen, PlanPage, help_screen
from offspec.ui.tui.sessions_screen import SessionsScreen
from offspec.ui.tui.status import StatusLine
from offspec.ui.tui.transcript_entries import Entry
from offspec.ui.tui.transcript_view import TranscriptView
from offspec.ui.tui.tree_screen import TreeScreen


class UserInput:
    """Runner of commands and questions. Questions asked during an answer are queued visibly.

    Attributes:
        controller: Controller, None while a model is loading.
        answer: Running answer, or None.
        stopping: Whether the running answer is being stopped.
        waiting: Queued questions.
        next_command: Command to run once the answer has stopped, or "".
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
        """Make a runner.

        Args:
            app: The chat app.
            engine: Thread of the engine.
            transcript: View of the conversation.
            composer: Input field.
            load: Loads a model.
            busy: Called with True when an answer begins and False when it ends.
            show_stats: Called when the conversation has changed.
            params: Returns the conversation's sampling parameters, also while its model is loading.
            defaults: Returns the parameters of `/set default`.
        """
        self._app, self._engine, self._transcript, self._composer = app, engine, transcript, composer
        self._load, self._busy, self._show_stats = load, busy, show_stats
        self._params, self._defaults = params, defaults
        self.waiting: list[Entry] = []
        self._settings: list[str] = []  # arguments of /set given while the model is loading
        self._asked: Entry | None = None
        self._edits = False
        self._loaded = False  # whether a model was loaded, so that its sampling defaults are known
        self.controller: ChatController | None = None
        self.answer: Answer | None = None
        self.stopping = False
        self.next_command = ""

    async def ask(self, text: str) -> None:
        """Send a question with its attachments, or queue it."""
        text = text if self.controller is None else self.controller.build_question(text)
        self.waiting.append(await self._transcript.ask(text, waiting=True))
        await self.run_next_question()

    def apply_settings(self) -> None:
        """Apply the `/set` commands given while the model was loading."""
        assert self.controller is not None
        self._loaded = True
        if self._settings:
            self.controller.session.params = self._effective_params()
            self._settings.clear()

    def _effective_params(self) -> SamplingParams:
        params = self._params()
        for argument in self._settings:
            params = settings.run_set(params, argument, self._defaults())[0]
        return params

    async def run_next_question(self) -> None:
        """Send the first queued question, if there is one and it can be sent."""
        if self.controller is None or self.answer is not None or not self.waiting:
            return
        entry = self.waiting.pop(0)
        self._transcript.send(entry)
        await self._begin(self.controller.ask(entry.text), entry)

    async def _begin(
        self, events: Generator[Event, None, None], asked: Entry | None, *, edits: bool = False
    ) -> None:
        """Run an answer.

        asked: its question if it is new; returned to the composer if refused. edits: whether the answer
        replaces messages, which are restored if it is refused.
        """
        assert self.answer is None
        self._asked, self._edits, self.stopping = asked, edits, False
        self.answer = await self._transcript.begin_answer()
        self._engine.answer(events)
        self._busy(True)

    def stop(self) -> None:
        """Stop the answer; its text so far is kept."""
        self.next_command = ""
        if self.answer is not None:
            self.stopping = True
            self._engine.stop()

    async def return_waiting(self) -> None:
        """Return queued questions to the composer."""
        waiting, self.waiting = self.waiting, []
        for entry in waiting:
            await self._transcript.remove_entry(entry)
        if waiting:
            self._composer.prepend(escaped("\n".join(entry.text for entry in waiting)))

    async def end(self, message: AnswerDone) -> None:
        """Handle the end of an answer. After an error, queued questions return to the composer."""
        answer, result, error = self.answer, message.result, message.error
        if answer is None:
            return
        self.answer, self.stopping = None, False
        self._busy(False)
        if result is not None:
            answer.finish(ending_line(result.finish_reason), self._fork())
            await self._show_kept(answer)
            return
        answer.finish(ending_line("failed"), self._fork())
        await self.return_waiting()
        if isinstance(error, RequestError):
            await self._refused(answer)
        else:
            await self._show_kept(answer)
        await self._transcript.note(_error_hint(error), "error")

    def _fork(self) -> Fork | None:
        """Return the versions of the last turn, or None if there is only one."""
        assert self.controller is not None
        session = self.controller.session
        at = len(session.messages) - 2
        return next((fork for fork in session.branches if fork.at == at), None)

    async def _show_kept(self, answer: Answer) -> None:
        """Show the previous answer again if a retry produced nothing."""
        assert self.controller is not None
        messages = self.controller.session.messages
        if self._edits and printable(messages[-1].content) != answer.state.text:
            await self.show_conversation()
            await self._transcript.note("No new answer; the previous one is kept.", "notice")

    async def step_version(self, by: int) -> None:
        """Show the previous or next version, if any, of the last turn that has several."""
        if self.controller is not None and (forks := self.controller.session.branches):
            await self.switch(forks[-1].active + by, forks[-1].at)

    async def switch(self, number: int, at: int) -> None:
        """Show a version of the turn that begins at this message, if there is one."""
        if self.controller is None or self.answer is not None:
            return
        fork = next((fork for fork in self.controller.session.branches if fork.at == at), None)
        if fork is not None and 0 <= number < len(fork.versions):
            await self._show(branch_commands.switch(self.controller, fork, number), self.controller)

    async def _refused(self, answer: Answer) -> None:
        """Restore the display after a refused question, which left the conversation unchanged."""
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
        """Show these messages and queued questions; arrow keys recall the questions."""
        await self._transcript.show(messages, self.waiting, forks)
        self._composer.recalled = [escaped(printable(m.content)) for m in messages if m.role == "user"]

    async def run_next_command(self) -> None:
        """Run the command that was given while an answer was stopping, if any."""
        line, self.next_command = self.next_command, ""
        if line:
            await self.command(line)

    async def command(self, line: str) -> None:
        """Run a command and show its result or error.

        The engine's thread may be ahead of the screen: an answer counts as over once the screen shows it.
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
                raise RequestError(
                    f"/{command.name} cannot run during an answer; stop the answer first (Esc)"
                )
        except OffspecError as error:
            await self._transcript.note(user_message(error), "error")

    async def _without_a_model(self, name: str, argument: str) -> None:
        if name == "quit":
            await self._app.action_quit()
        elif name == "set":
            params, defaults = self._effective_params(), self._defaults()
            news = settings.run_set(params, argument, defaults, loading=not self._loaded)[1]
            self._settings += [argument] if argument else []
            await self._transcript.note(news)
        elif name == "help" and argument:
            await self._transcript.note(help_page(argument, self._effective_params()))
        elif name == "help":
            self._app.push_screen(help_screen())
        else:
            raise RequestError(f"the model is still loading; use /{name} once it is loaded")

    async def _show(self, outcome: command_results.CommandResult, controller: ChatController) -> None:
        match outcome:
            case command_results.ShowText(markdown):
                await self._transcript.note(markdown)
                self._show_stats()  # the title may have changed
                self._engine.recount()  # the system message may have changed
            case command_results.StreamAnswer(events, question, dropped):
                await self._transcript.remove_messages(dropped)
                asked = None if question is None else await self._transcript.ask(question)
                await self._begin(events, asked, edits=bool(dropped) or asked is None)
            case command_results.TurnsRemoved(dropped):
                await self._transcript.remove_messages(dropped)
                self._show_stats()
            case command_results.BranchSwitched(at, dropped, shown):
                forks = controller.session.branches
                await self._transcript.replace_end(dropped, shown, forks, at)
                self._show_stats()
            case command_results.EditQuestion():
                self._composer.begin_edit(printable(outcome.line))
                self._app.query_one(StatusLine).set_status("Enter sends the edited question; Esc cancels")
            case command_results.SuggestCommand(reason, line):
                await self._transcript.note(reason)
                self._composer.begin_edit(line)
                self._app.query_one(StatusLine).set_status("Enter sends it; Esc cancels")
            case command_results.NewConversation(note):
                await self.show_conversation()
                self._engine.recount()
                await self._transcript.note(note, "notice")
            case command_results.ShowSources(shown):
                self._transcript.show_sources(shown)
                self._app.query_one(StatusLine).set_status(LEGEND if shown else "")
            case command_results.Reload(config):
                self._load(config)
            case command_results.CopyToClipboard(text, what):
                self._app.copy_to_clipboard(text)
                await self._transcript.note(f"Copied {what}.", "notice")
            case command_results.OpenView(view):
                self._open(view, controller)
            case command_results.Quit():
                await self._app.action_quit()

    def _open(self, view: command_results.View, controller: ChatController) -> None:
        match view:
            case "help":
                self._app.push_screen(help_screen())
            case "tree":
                self._app.push_screen(TreeScreen(controller.trees))
            case "stats":
                self._app.push_screen(PageScreen("Statistics", report(controller)))
            case "plan":
                assert controller.engine.plan is not None
                self._app.push_screen(PageScreen("Plan", PlanPage(controller.engine.plan)))
            case "sessions":

                async def chosen(file: Path | None) -> None:
                    self._show_stats()  # the current conversation may have been renamed
                    if file is not None:
                        await self.command(f"/load {file}")

                saved = SessionsScreen(
                    controller.archive, partial(rename, controller), partial(delete, controller)
                )
                self._app.push_screen(saved, chosen)


def _error_hint(error: BaseException | None) -> str:
    if isinstance(error, RequestError):
        return user_message(error)
    if isinstance(error, OffspecError):
        return f"{user_message(error)}\n\nThe partial answer is kept. `/retry` asks again."
    return f"{type(error).__name__}: {error}\n\nThis is a bug in offspec. The partial answer is kept."
