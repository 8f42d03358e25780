"""Controller of a chat: one engine, its conversation, and the operations of a user interface."""

import re
import shlex
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from offspec.chat.archive import SessionArchive
from offspec.chat.conversation import Conversation
from offspec.checkpoint.open import local_path
from offspec.core.config import AUTO, EngineConfig, SamplingParams
from offspec.core.errors import OffspecError, RequestError
from offspec.core.events import Event, Finished, Notice, TreeSeen
from offspec.ui.chat.completion import Completer, Completion
from offspec.ui.chat.setup import ChatEngine, ChatSetup, Opener
from offspec.ui.chat.stats import ChatStats
from offspec.ui.messages import user_message

NO_MODEL = (
    "No model is loaded now. /draft NAME, such as /draft auto, loads it again. The conversation is saved."
)
_FENCES = re.compile(r"^[ \t]*(`{3,})", re.MULTILINE)
_TREES = 200  # number of the latest trees kept


@dataclass(frozen=True, slots=True)
class Attachment:
    """Attached file with display name, text, and number of tokens of the text."""

    file: Path
    name: str
    text: str
    tokens: int

    @property
    def as_code_block(self) -> str:
        """Code block for a question, with a fence longer than any fence in the text."""
        longest = max((len(fence) for fence in _FENCES.findall(self.text)), default=2)
        fence = "`" * (longest + 1)
        return f"{self.name}:\n\n{fence}\n{self.text}\n{fence}"


class ChatController:
    """Controller shared by both user interfaces of a chat. It owns the engine: `close` closes it.

    An answer runs in the thread that runs its generator. `stop`, `on_event` and methods that only read may be
    called from any thread.

    Attributes:
        session: The conversation, saved in `file` from its first question on.
        stats: Speed statistics.
        trees: Trees of the latest passes, the last one at the end.
        notes: Lines for the user.
        sources: Whether answers show the source of each token.
        attachments: Files to send with the next question.
        config: Requested configuration of the engine.
    """

    def __init__(self, engine: ChatEngine, setup: ChatSetup, archive: SessionArchive) -> None:
        """Begin a conversation, or resume the one that `setup` names. Raises SessionError."""
        self.engine, self.setup, self.archive = engine, setup, archive
        self.config = setup.config
        self.stats = ChatStats()
        self.trees: deque[TreeSeen] = deque(maxlen=_TREES)
        self.notes: list[str] = []
        self.sources = False
        self.attachments: list[Attachment] = []
        self.is_open = True
        self._answered: set[int] = set()  # keys by `_answer_key` of completed answers
        self._used: str = AUTO  # sources in use, among the loaded ones
        self._kind = local_path(setup.config.model)[1]  # a folder, a file, or "" for a Hugging Face id
        self._completer = Completer(archive)
        self._params = self.defaults  # of the latest answer
        self.session = engine.chat(system=setup.system, params=self.defaults)
        self.session.listen(self._on_answer_event)
        self.file = archive.file_for(self.session.conversation)
        file = setup.session_to_resume(archive)
        if setup.resume == "" and archive.damaged:
            self.notes.append(archive.unreadable_summary())
        if file is not None:
            self._resume(file)
            return
        self.session.keep(self.file)
        if setup.resume is not None:
            self.notes.append(f"No conversation with {self.config.model} is saved yet; this is a new one.")
        if self.defaults != setup.sampling.apply_to(SamplingParams()):
            summary = setup.sampling.summary(engine.sampling_defaults, "/set changes them")
            self.notes.append(f"Sampling defaults: {summary}.")

    @property
    def defaults(self) -> SamplingParams:
        """Sampling parameters of a new conversation: the model's, overridden by options."""
        return self.setup.sampling.apply_to(self.engine.sampling_defaults)

    @classmethod
    def open(
        cls, setup: ChatSetup, opener: Opener, archive: SessionArchive, notify: Callable[[Event], None]
    ) -> "ChatController":
        """Load the model and prepare the conversation. Raises OffspecError."""
        engine = opener(setup.config, setup.plan, notify)
        try:
            return cls(engine, setup, archive)
        except BaseException:
            engine.close()
            raise

    def build_question(self, text: str) -> str:
        """Append the attached files to a question, and clear the attachments."""
        blocks, self.attachments[:] = [attachment.as_code_block for attachment in self.attachments], []
        return "\n\n".join([text, *blocks])

    def ask(self, text: str) -> Generator[Event, None, None]:
        """Send a question as is. The generator raises OffspecError when it runs."""
        return self._started(self.session.send(text, trees=self.setup.trees), self.session.params)

    def retry(self, params: SamplingParams) -> Generator[Event, None, None]:
        """Generate another answer to the last question with these parameters, like `ask`."""
        return self._started(self.session.retry(params=params, trees=self.setup.trees), params)

    def edit(self, text: str) -> Generator[Event, None, None]:
        """Replace the last question and its answer by this question, like `ask`."""
        return self._started(self.session.edit(text, trees=self.setup.trees), self.session.params)

    def _started(
        self, events: Generator[Event, None, None], params: SamplingParams
    ) -> Generator[Event, None, None]:
        self._params = params
        return events if self.is_open else _no_model()

    def has_answer(self, params: SamplingParams) -> bool:
        """Return whether these parameters would reproduce an answer that the last question already has."""
        return params.temperature == 0 and self._answer_key(params) in self._answered

    def _answer_key(self, params: SamplingParams) -> int:
        """Return a hash of everything that determines the answer to the last question at temperature 0."""
        messages = [(message.role, message.content) for message in self.session.messages]
        while messages and messages[-1][0] == "assistant":
            messages.pop()
        return hash((replace(params, seed=None), self.session.system, tuple(messages)))

    def _on_answer_event(self, event: Event | None) -> None:
        """Record an event of the running answer for statistics and trees; None marks its end."""
        if event is None:
            self.stats.end_answer()
        elif isinstance(event, TreeSeen):
            self.trees.append(event)
        else:
            self.on_event(event)
            if isinstance(event, Finished) and event.result.finish_reason != "halted":
                self._answered.add(self._answer_key(self._params))

    def forget_completions(self) -> None:
        """Drop cached completions, whose data may have changed."""
        self._completer.forget()

    def complete(self, line: str) -> list[Completion]:
        """Return possible completions of a command line, as whole lines."""
        return self._completer.complete(line)

    def stop(self) -> None:
        """Stop the running answer; its text so far is kept."""
        self.session.stop()

    def on_event(self, event: Event) -> None:
        """Handle an engine event that is not part of an answer, from any thread."""
        if isinstance(event, Notice):
            self.notes.append(user_message(event))
        else:
            self.stats.on_event(event)

    def use(self, draft: str) -> None:
        """Use other draft sources among the loaded ones. Raises RequestError."""
        self.engine.use(draft)
        self._used = draft

    def check_reload(self) -> None:
        """Raise RequestError if the model no longer exists and could not be loaded again."""
        if local_path(self.config.model)[1] != self._kind:
            raise RequestError(
                f"this loads the model again, but {self.config.model} no longer exists: restore the "
                f"{self._kind}, or /quit and start with its new name (--session continues this conversation)"
            )

    def reload(
        self,
        config: EngineConfig,
        opener: Opener,
        notify: Callable[[Event], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Reload the model with other settings, or with the previous ones if that fails.

        The conversation stays. Raises OffspecError if no engine is open in the end.

        Args:
            config: New configuration.
            opener: Function that opens an engine.
            notify: Listener of the new engine.
            failed: Called with the error before the previous settings are loaded again.
        """
        self.engine.close()  # two do not fit in memory
        self.is_open, used = False, AUTO
        try:
            engine = opener(config, self._plan_for(config), notify)
        except Exception as error:
            failed(error)
            config, used = self.config, self._used
            engine = opener(config, self._plan_for(config), notify)
            with suppress(RequestError):  # with less memory, some of its sources may be missing
                engine.use(used)
        session = engine.chat()
        session.listen(self._on_answer_event)
        session.resume(self.session.conversation)
        with suppress(OffspecError):  # the next session writes the file or reports the error
            self.session.close()
        session.keep(self.file)
        self.engine, self.session, self.config = engine, session, config
        self.is_open, self._used = True, used
        session.recount()

    def _plan_for(self, config: EngineConfig) -> Path | None:
        """Return the plan file for the settings of the command line, None for other settings."""
        return self.setup.plan if config == self.setup.config else None

    def new_conversation(self) -> None:
        """Begin a new conversation with the same system message and parameters.

        Raises DiskFullError or SessionError if the current one cannot be written, and then keeps it.
        """
        self.session.clear()
        self.trees.clear()
        self.file = self.archive.file_for(self.session.conversation)
        self.session.keep(self.file)

    def load_conversation(self, file: Path) -> str:
        """Continue the conversation in a file and save it there. Return a note for the user.

        Raises SessionError.
        """
        talk = Conversation.read(file)
        before = talk.model
        self.session.resume(talk, file)
        self.file = file
        self.trees.clear()
        questions = "one question" if talk.turns == 1 else f"{talk.turns} questions"
        note = f"Resuming {talk.title!r} ({questions})."
        if before != self.config.model:
            note += f" Its earlier answers are from {before}; {self.config.model} continues."
        return note

    def resume_command(self) -> str:
        """Return the command that continues the conversation; "" if it is empty or was not saved."""
        conversation = self.session.conversation
        if not conversation.turns or not self.file.exists():
            return ""
        kept_here = self.file == self.archive.file_for(conversation)
        name = conversation.id if kept_here else str(self.file.resolve())
        return f"to continue: {shlex.join((*self.setup.command, '--session', name))}"

    def close(self) -> None:
        """Stop the running answer, and close the engine."""
        self.stop()
        self.engine.close()
        with suppress(OffspecError):  # the failure to write it was reported before
            self.session.close()

    def _resume(self, file: Path) -> None:
        self.notes.append(self.load_conversation(file))
        self.session.params = self.setup.merge_params(self.session.params)
        if self.setup.system is not None:
            self.session.system = self.setup.system
        self.session.recount()


def _no_model() -> Generator[Event, None, None]:
    raise RequestError("no model is loaded; /draft auto loads it again")
    yield
