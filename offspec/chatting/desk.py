"""The desk: one engine, the conversation on it, and everything a face can ask of the two."""

from collections import deque
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from offspec.archive import Archive
from offspec.chatting import completing
from offspec.chatting.actions import ACTIONS
from offspec.chatting.commands import parse, spoken
from offspec.chatting.completing import Completion
from offspec.chatting.figures import Figures
from offspec.chatting.opening import ChatEngine, Setup
from offspec.chatting.outcomes import Outcome
from offspec.conversation import Conversation
from offspec.errors import RequestError
from offspec.events import Event, Notice, TreeSeen

__all__ = ["Completion", "Desk"]

_TREES = 200  # of the latest passes, to look back through


class Desk:
    """What both faces of a chat drive. Takes the engine over: `close` closes it.

    session: the conversation, which is kept in `file` from its first question on. figures: how fast it goes.
    trees: those of the latest passes, the last one at the end. notes: lines the user should know. sources:
    whether answers show where their tokens came from. config: what the engine was asked to be.

    Answers run where their generator is run, in whichever thread; `stop`, `hear` and what only reads may be
    called from any.
    """

    def __init__(self, engine: ChatEngine, setup: Setup, archive: Archive) -> None:
        """Begin a conversation, or resume the one that `setup` names. Raises SessionError."""
        self.engine, self.setup, self.archive = engine, setup, archive
        self.config = setup.config
        self.figures = Figures()
        self.trees: deque[TreeSeen] = deque(maxlen=_TREES)
        self.notes: list[str] = []
        self.sources = False
        self.session = engine.chat(system=setup.system, params=setup.params)
        self.file = archive.file_for(self.session.conversation)
        if setup.resume is None:
            self.session.keep(self.file)
        else:
            self._resume(setup.resume)

    def ask(self, text: str) -> Generator[Event, None, None]:
        """Say something to the model. Raises OffspecError, when the generator is run."""
        return self.follow(self.session.send(spoken(text), trees=self.setup.trees))

    def follow(self, events: Generator[Event, None, None]) -> Generator[Event, None, None]:
        """The same events, which figures and trees take note of."""
        try:
            with closing(events):
                for event in events:
                    if isinstance(event, TreeSeen):
                        self.trees.append(event)
                    else:
                        self.hear(event)
                    yield event
        finally:
            self.figures.idle()

    def run(self, line: str) -> Outcome:
        """Do what a command says. Raises OffspecError; nothing has changed then."""
        command, argument = parse(line)
        if self.session.busy and not command.while_busy:
            raise RequestError("stop the answer first (Esc)")
        if argument and not command.takes_argument:
            raise RequestError(f"/{command.name} takes nothing after it")
        return ACTIONS[command.name](self, argument)

    def complete(self, line: str) -> list[Completion]:
        """Whole lines that could take the place of one that begins a command."""
        return completing.complete(line, self.archive)

    def stop(self) -> None:
        """End the answer under way; what came is kept."""
        self.session.stop()

    def hear(self, event: Event) -> None:
        """Take what the engine tells aside, from whichever thread."""
        if isinstance(event, Notice):
            self.notes.append(event.text)
        else:
            self.figures.hear(event)

    def adopt(self, engine: ChatEngine) -> None:
        """Go on with the same conversation on another engine. The one before should be closed by now."""
        session = engine.chat()
        session.resume(self.session.conversation)
        session.keep(self.file)
        self.engine, self.session = engine, session
        self.config = replace(self.config, draft=engine.config.draft)

    def begin_anew(self) -> None:
        """A new conversation with the same system message and parameters."""
        self.session.clear()
        self.trees.clear()
        self.file = self.archive.file_for(self.session.conversation)
        self.session.keep(self.file)

    def take_up(self, file: Path) -> str:
        """Go on with the conversation in a file, and keep it there; a note for the user.

        Raises SessionError.
        """
        talk = Conversation.read(file)
        before = talk.model
        self.session.resume(talk)
        self.session.keep(file)
        self.file = file
        self.trees.clear()
        questions = "one question" if talk.turns == 1 else f"{talk.turns} questions"
        note = f"Going on with {talk.title!r}: {questions} so far."
        if before != self.config.model:
            note += f" It was held with {before}; {self.config.model} goes on."
        return note

    def close(self) -> None:
        """Stop what runs, and close the engine."""
        self.stop()
        self.engine.close()

    def _resume(self, name: str) -> None:
        if name:
            self.notes.append(self.take_up(self.archive.find(name)))
        elif (latest := self.archive.latest(self.config.model)) is not None:
            self.notes.append(self.take_up(latest.file))
        else:
            self.session.keep(self.file)
            self.notes.append(f"No conversation with {self.config.model} is saved yet; this is a new one.")
            return
        given = {key: getattr(self.setup.params, key) for key in self.setup.given}
        self.session.params = replace(self.session.params, **given)
        if self.setup.system is not None:
            self.session.system = self.setup.system
