"""The controller of a chat: one engine, the conversation on it, and what a user interface can ask of them."""

import re
import shlex
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from offspec.chat.archive import Archive
from offspec.chat.conversation import Conversation
from offspec.checkpoint.open import local_path
from offspec.core.config import AUTO, EngineConfig, SamplingParams
from offspec.core.errors import OffspecError, RequestError
from offspec.core.events import Event, Finished, Notice, TreeSeen
from offspec.ui.chat.completion import Completer, Completion
from offspec.ui.chat.setup import ChatEngine, Opener, Setup
from offspec.ui.chat.stats import ChatStats
from offspec.ui.told import told

NO_MODEL = "No model is loaded now: /draft NAME, such as /draft auto, loads it again. What was said is saved."
_FENCES = re.compile(r"^[ \t]*(`{3,})", re.MULTILINE)
_TREES = 200  # of the latest passes, to look back through


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file, its name as it is shown, and its text. tokens: of the text."""

    file: Path
    name: str
    text: str
    tokens: int

    @property
    def block(self) -> str:
        """In a question. No line of the text closes the block."""
        longest = max((len(fence) for fence in _FENCES.findall(self.text)), default=2)
        fence = "`" * (longest + 1)
        return f"{self.name}:\n\n{fence}\n{self.text}\n{fence}"


class ChatController:
    """What both user interfaces of a chat drive. Takes the engine over: `close` closes it.

    session: the conversation, which is kept in `file` from its first question on. stats: how fast it goes.
    trees: those of the latest passes, the last one at the end. notes: lines the user should know. sources:
    whether answers show where their tokens came from. attached: files that go with the next question. config:
    what the engine was asked to be.

    Answers run where their generator is run, in whichever thread; `stop`, `on_event` and what only reads may
    be called from any.
    """

    def __init__(self, engine: ChatEngine, setup: Setup, archive: Archive) -> None:
        """Begin a conversation, or resume the one that `setup` names. Raises SessionError."""
        self.engine, self.setup, self.archive = engine, setup, archive
        self.config = setup.config
        self.stats = ChatStats()
        self.trees: deque[TreeSeen] = deque(maxlen=_TREES)
        self.notes: list[str] = []
        self.sources = False
        self.attached: list[Attachment] = []
        self.is_open = True
        self._answered: set[int] = set()  # what was answered to the end, by `_asked_with`
        self._used: str = AUTO  # the sources among those that are loaded
        self._kind = local_path(setup.config.model)[1]  # a folder, a file, or "" for a hub id
        self._completer = Completer(archive)
        self._params = self.defaults  # of the latest answer
        self.session = engine.chat(system=setup.system, params=self.defaults)
        self.session.listen(self._hear)
        self.file = archive.file_for(self.session.conversation)
        file = setup.resumed(archive)
        if setup.resume == "" and archive.damaged:
            self.notes.append(archive.unread())
        if file is not None:
            self._resume(file)
            return
        self.session.keep(self.file)
        if setup.resume is not None:
            self.notes.append(f"No conversation with {self.config.model} is saved yet; this is a new one.")
        if self.defaults != setup.sampling.over(SamplingParams()):
            summary = setup.sampling.summary(engine.sampling_defaults, "/set changes them")
            self.notes.append(f"Sampling defaults: {summary}.")

    @property
    def defaults(self) -> SamplingParams:
        """The sampling parameters of a new conversation: the model's, and those of options over them."""
        return self.setup.sampling.over(self.engine.sampling_defaults)

    @classmethod
    def open(
        cls, setup: Setup, opener: Opener, archive: Archive, notify: Callable[[Event], None]
    ) -> "ChatController":
        """Load the model, and lay out its conversation. Raises OffspecError."""
        engine = opener(setup.config, setup.plan, notify)
        try:
            return cls(engine, setup, archive)
        except BaseException:
            engine.close()
            raise

    def compose(self, text: str) -> str:
        """A question with the files that are attached, which go with this one alone."""
        blocks, self.attached[:] = [attachment.block for attachment in self.attached], []
        return "\n\n".join([text, *blocks])

    def ask(self, text: str) -> Generator[Event, None, None]:
        """Say this to the model, as it is. Raises OffspecError, when the generator is run."""
        return self._begun(self.session.send(text, trees=self.setup.trees), self.session.params)

    def retry(self, params: SamplingParams) -> Generator[Event, None, None]:
        """As `ask`, for another answer to the last question, with these parameters."""
        return self._begun(self.session.retry(params=params, trees=self.setup.trees), params)

    def edit(self, text: str) -> Generator[Event, None, None]:
        """As `ask`, in place of the last question and its answer."""
        return self._begun(self.session.edit(text, trees=self.setup.trees), self.session.params)

    def _begun(
        self, events: Generator[Event, None, None], params: SamplingParams
    ) -> Generator[Event, None, None]:
        self._params = params
        return events if self.is_open else _no_model()

    def has_answer(self, params: SamplingParams) -> bool:
        """Whether the last question has the answer that these parameters would give again, word for word."""
        return params.temperature == 0 and self._asked_with(params) in self._answered

    def _asked_with(self, params: SamplingParams) -> int:
        """What decides the answer to the last question at temperature 0; a conversation may be long."""
        said = [(message.role, message.content) for message in self.session.messages]
        while said and said[-1][0] == "assistant":
            said.pop()
        return hash((replace(params, seed=None), self.session.system, tuple(said)))

    def _hear(self, event: Event | None) -> None:
        """Note an event of the answer under way for statistics and trees; None: it has ended."""
        if event is None:
            self.stats.idle()
        elif isinstance(event, TreeSeen):
            self.trees.append(event)
        else:
            self.on_event(event)
            if isinstance(event, Finished) and event.result.finish_reason != "halted":
                self._answered.add(self._asked_with(self._params))

    def forget_completions(self) -> None:
        """What they were made of may have changed."""
        self._completer.forget()

    def complete(self, line: str) -> list[Completion]:
        """Whole lines that could take the place of one that begins a command."""
        return self._completer.complete(line)

    def stop(self) -> None:
        """End the answer under way; what came is kept."""
        self.session.stop()

    def on_event(self, event: Event) -> None:
        """Take what the engine tells aside, from whichever thread."""
        if isinstance(event, Notice):
            self.notes.append(told(event))
        else:
            self.stats.on_event(event)

    def use(self, draft: str) -> None:
        """Draw on other sources of those that are loaded. Raises RequestError."""
        self.engine.use(draft)
        self._used = draft

    def check_reload(self) -> None:
        """Raises RequestError where the model is no longer there to be loaded again."""
        if local_path(self.config.model)[1] != self._kind:
            raise RequestError(
                f"this loads the model again, and {self.config.model} is no longer there: give the "
                f"{self._kind} its name back, or /quit and begin with the new name (--session continues this)"
            )

    def reload(
        self,
        config: EngineConfig,
        opener: Opener,
        notify: Callable[[Event], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Load the model with other settings under the same conversation, or as it was where that fails.

        notify: the listener of the new engine. failed: hears why it is as it was, before it is loaded again.
        Raises OffspecError where no engine is open in the end; the conversation is there all the same.
        """
        self.engine.close()  # two do not fit in memory
        self.is_open, used = False, AUTO
        try:
            engine = opener(config, self._plan_for(config), notify)
        except Exception as error:
            failed(error)
            config, used = self.config, self._used
            engine = opener(config, self._plan_for(config), notify)
            with suppress(RequestError):  # the sources it had are not all there in less memory
                engine.use(used)
        session = engine.chat()
        session.listen(self._hear)
        session.resume(self.session.conversation)
        with suppress(OffspecError):  # what it could not write, the next one will, or say so
            self.session.close()
        session.keep(self.file)
        self.engine, self.session, self.config = engine, session, config
        self.is_open, self._used = True, used
        session.recount()

    def _plan_for(self, config: EngineConfig) -> Path | None:
        """The plan file was made for the settings of the command line, so only they get it."""
        return self.setup.plan if config == self.setup.config else None

    def new_conversation(self) -> None:
        """A new conversation with the same system message and parameters.

        Raises DiskFullError, SessionError where the one before cannot be written: it stays.
        """
        self.session.clear()
        self.trees.clear()
        self.file = self.archive.file_for(self.session.conversation)
        self.session.keep(self.file)

    def load_conversation(self, file: Path) -> str:
        """Go on with the conversation in a file, and keep it there; a note for the user.

        Raises SessionError.
        """
        talk = Conversation.read(file)
        before = talk.model
        self.session.resume(talk, file)
        self.file = file
        self.trees.clear()
        questions = "one question" if talk.turns == 1 else f"{talk.turns} questions"
        note = f"Going on with {talk.title!r}: {questions} so far."
        if before != self.config.model:
            note += f" It was held with {before}; {self.config.model} goes on."
        return note

    def resume_line(self) -> str:
        """What to type to go on; "" where nothing was said, or it could not be saved."""
        conversation = self.session.conversation
        if not conversation.turns or not self.file.exists():
            return ""
        kept_here = self.file == self.archive.file_for(conversation)
        name = conversation.id if kept_here else str(self.file.resolve())
        return f"to continue: {shlex.join((*self.setup.command, '--session', name))}"

    def close(self) -> None:
        """Stop what runs, and close the engine."""
        self.stop()
        self.engine.close()
        with suppress(OffspecError):  # it was told when it could not be written
            self.session.close()

    def _resume(self, file: Path) -> None:
        self.notes.append(self.load_conversation(file))
        self.session.params = self.setup.params_over(self.session.params)
        if self.setup.system is not None:
            self.session.system = self.setup.system
        self.session.recount()


def _no_model() -> Generator[Event, None, None]:
    raise RequestError("no model is loaded; /draft auto loads it again")
    yield
