"""Questions that wait, and the answer that is under way."""

from collections.abc import Generator
from typing import TYPE_CHECKING

from offspec.core.errors import OffspecError, RequestError
from offspec.core.events import Event
from offspec.ui.chat.commands import escaped
from offspec.ui.tui.answer import Answer, ending_of
from offspec.ui.tui.messages import AnswerDone, AnswerStarted, AnswerText
from offspec.ui.tui.transcript_view import Entry

if TYPE_CHECKING:
    from offspec.ui.tui.app import ChatApp


class Asking:
    """One question after the other: what is asked meanwhile waits in the transcript, to be seen.

    answer: the one under way. stopping: it was told to stop. next_command: what the user wants done as soon
    as it has.
    """

    def __init__(self, app: "ChatApp") -> None:
        self._app = app
        self._waiting: list[Entry] = []
        self._asked: Entry | None = None
        self._edits = False
        self.answer: Answer | None = None
        self.stopping = False
        self.next_command = ""

    @property
    def waiting(self) -> tuple[Entry, ...]:
        return tuple(self._waiting)

    async def ask(self, text: str) -> None:
        """Send a question, or keep it until it can be sent."""
        self._waiting.append(await self._app.transcript.ask(text, waiting=True))
        await self.go_on()

    async def go_on(self) -> None:
        """Send the question that has waited longest, if there is one and it can be sent."""
        app = self._app
        if app.controller is None or app.is_loading or self.answer is not None or not self._waiting:
            return
        entry = self._waiting.pop(0)
        app.transcript.send(entry)
        await self.begin(app.controller.ask(entry.text), entry)

    async def begin(
        self, events: Generator[Event, None, None], asked: Entry | None, *, edits: bool = False
    ) -> None:
        """Run an answer. asked: its question where it is new, which comes back if it is refused.

        edits: it takes the place of what is shown no more, which comes back as well.
        """
        assert self._app.engine is not None and self.answer is None
        self._asked, self._edits, self.stopping = asked, edits, False
        self.answer = await self._app.transcript.begin_answer()
        self._app.engine.answer(events)
        self._app.busy(True)

    def stop(self) -> None:
        """Break the answer off; what came is kept."""
        self.next_command = ""
        if self.answer is not None and self._app.engine is not None:
            self.stopping = True
            self._app.engine.stop()

    def take_command(self) -> str:
        """The command that waited for the end; "" where none did."""
        line, self.next_command = self.next_command, ""
        return line

    async def return_waiting(self) -> bool:
        """Return what waits to the composer; False where nothing does."""
        waiting, self._waiting = self._waiting, []
        for entry in waiting:
            await self._app.transcript.remove_entry(entry)
        if waiting:
            self._app.composer.prepend(escaped("\n".join(entry.text for entry in waiting)))
        return bool(waiting)

    def begun(self, message: AnswerStarted) -> None:
        if self.answer is not None:
            self.answer.state.opened = message.opened

    def add(self, message: AnswerText) -> None:
        if self.answer is not None:
            self.answer.write(message.text, message.pieces)

    async def end(self, message: AnswerDone) -> None:
        """The answer is over. After a fault nothing is sent by itself: what waited comes back."""
        answer, result, error = self.answer, message.result, message.error
        if answer is None:
            return
        self.answer, self.stopping = None, False
        self._app.busy(False)
        if result is not None:
            answer.finish(ending_of(result.finish_reason))
            return
        answer.finish(ending_of("failed"))
        await self.return_waiting()
        if isinstance(error, RequestError):
            await self._refused(answer)
        await self._app.transcript.note(_what_to_do(error), "error")

    async def _refused(self, answer: Answer) -> None:
        """The conversation is as it was, and so is what is shown."""
        app, asked = self._app, self._asked
        if asked is None or self._edits:
            await app.show_conversation()
        else:
            await app.transcript.remove_entry(app.transcript.entry_of(answer))
            await app.transcript.remove_entry(asked)
        if asked is not None:
            app.composer.prepend(f"/edit {asked.text}" if self._edits else escaped(asked.text))


def _what_to_do(error: Exception | None) -> str:
    if isinstance(error, RequestError):
        return str(error)
    if isinstance(error, OffspecError):
        return f"{error}\n\nWhat came is kept. `/retry` asks again, and you can go on writing."
    return f"{type(error).__name__}: {error}\n\nThis is a bug in offspec. What came is kept."
