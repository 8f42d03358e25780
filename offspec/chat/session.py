"""A conversation with an engine: questions in, events out, and what was said kept in a file as it comes."""

from collections.abc import AsyncGenerator, Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from offspec.chat.answering import Answering, Ask
from offspec.chat.branches import Fork, MessageTree
from offspec.chat.conversation import Conversation, copy_id
from offspec.chat.message import Message, checked_text
from offspec.chat.turns import seeded_anew, to_answer_again, turns_back, with_other_question, with_question
from offspec.core.config import SamplingParams, checked_params
from offspec.core.errors import RequestError
from offspec.core.events import Event
from offspec.core.threads import in_thread
from offspec_planners.units import format_count


class ChattingEngine(Protocol):
    """An engine that begins conversations."""

    def chat(self, *, chat_template_kwargs: Mapping[str, Any] | None = None) -> "Session": ...


class Session(Answering):
    """One conversation. Several threads may use it; their questions wait for each other.

    A question that is refused, with a RequestError before its first pass, leaves the conversation as it was.
    After a later error, the question and the text of the answer so far stay in it.

    Args:
        engine: Answers token ids.
        wording: The tokenizer and chat template of that engine.
        conversation: What has been said.
    """

    def __repr__(self) -> str:
        questions = format_count(self.conversation.turns, "question")
        return f"<Session, {questions}, {self.used} of {self.context} tokens>"

    @property
    def messages(self) -> tuple[Message, ...]:
        """Questions and answers, without the one that is coming."""
        return tuple(self.conversation.messages)

    @property
    def branches(self) -> tuple[Fork, ...]:
        """The turns that have several versions, by `retry` and `edit`; the last of them at the end."""
        return self.conversation.tree.forks()

    @property
    def params(self) -> SamplingParams:
        """How the next answers are chosen. May be set at any time; an answer under way does not change."""
        return self.conversation.params

    @params.setter
    def params(self, params: SamplingParams) -> None:
        self.conversation.params = checked_params(params)
        if not self.busy:  # else the answer under way will be written with it
            self._write()

    @property
    def system(self) -> str | None:
        """The system message.

        Setting it raises RequestError while an answer is under way, or where the text is not valid Unicode.
        """
        return self.conversation.system

    @system.setter
    def system(self, text: str | None) -> None:
        with self._turns.take(wait=False):
            self.conversation.system = checked_text(text) if text else None
            self._counted = False
            self._write()

    def send(
        self, text: str, *, params: SamplingParams | None = None, trees: bool = False
    ) -> Generator[Event, None, None]:
        """Ask, and yield the events of the answer as `Engine.stream` does.

        Where the conversation cannot be saved, a Notice says so once, and the answer continues. A generator
        that is closed early halts the answer; the text so far is kept. Where the context has no room for the
        whole conversation, its first turns are left out of the prompt, and a Notice says how many.

        Args:
            text: The question.
            params: How this answer is chosen; None: by the session's `params`.
            trees: Send a TreeSeen for every pass. Default False.

        Raises:
            OffspecError: See `offspec.core.errors`.
        """
        return self._run(self._question(text), params, self._halts.new(), trees=trees)

    def retry(
        self, *, params: SamplingParams | None = None, trees: bool = False
    ) -> Generator[Event, None, None]:
        """As `send`, for another answer to the last question. The one before is kept as a branch.

        It stays where nothing comes of the other. A fixed seed increases by one each time.
        """
        return self._run(self._again, params, self._halts.new(), trees=trees)

    def edit(
        self, text: str, *, params: SamplingParams | None = None, trees: bool = False
    ) -> Generator[Event, None, None]:
        """As `send`, in place of the last question and its answer, which are kept as a branch."""
        return self._run(self._other_question(text), params, self._halts.new(), trees=trees)

    def asend(
        self, text: str, *, params: SamplingParams | None = None, trees: bool = False
    ) -> AsyncGenerator[Event, None]:
        """`send` for `async` callers. Cancelled or closed, it halts the answer; the text so far is kept."""
        return self._answer_in_thread(self._question(text), params, trees)

    def aretry(
        self, *, params: SamplingParams | None = None, trees: bool = False
    ) -> AsyncGenerator[Event, None]:
        """`retry` for `async` callers; see `asend`."""
        return self._answer_in_thread(self._again, params, trees)

    def aedit(
        self, text: str, *, params: SamplingParams | None = None, trees: bool = False
    ) -> AsyncGenerator[Event, None]:
        """`edit` for `async` callers; see `asend`."""
        return self._answer_in_thread(self._other_question(text), params, trees)

    def rewind(self, turns: int = 1) -> tuple[Message, ...]:
        """Remove the last questions with their answers, and return them. Their other versions go as well.

        Args:
            turns: How many questions. Default 1.

        Raises:
            RequestError: There are fewer, or an answer is under way.
        """
        with self._turns.take(wait=False):
            tree = self.conversation.tree
            at = turns_back(tree, turns)
            self._change(tree.cut(at))
            return tree.messages[at:]

    def switch(self, number: int, at: int | None = None) -> None:
        """Go on with another version of a turn, and with all that followed it.

        Args:
            number: Which of the versions, 0 for the earliest.
            at: Where the question of the turn is in `messages`. Default: the last of `branches`.

        Raises:
            RequestError: There is no such version, or an answer is under way.
        """
        with self._turns.take(wait=False):
            tree = self.conversation.tree
            fork = tree.fork(at)
            if not 0 <= number < len(fork.versions):
                raise RequestError(f"there is no version {number}; there are 0 to {len(fork.versions) - 1}")
            if number != fork.active:
                self._change(tree.switched(fork.at, number))

    def clear(self) -> None:
        """Begin a new conversation with the same system message and parameters; it is not saved yet.

        Raises:
            RequestError: An answer is under way.
            SessionError: The file of the conversation before cannot be written; that one continues.
            DiskFullError: Likewise.
        """
        with self._turns.take(wait=False):
            old = self.conversation
            self._autosave.move(None, self._snapshot)
            self._take_up(Conversation(model=old.model, system=old.system, params=old.params))

    def keep(self, file: Path | None) -> None:
        """From now on write the conversation to a file, after each question and while its answer comes.

        A process that is killed loses no question, and at most two seconds of an answer. No other session, in
        this process or another, can use the same file until this one is closed, cleared, collected or kept
        elsewhere.

        Args:
            file: Where; None ends it.

        Raises:
            SessionError: Another session uses the file, or the file before cannot be written.
            DiskFullError: The file before cannot be written.
        """
        self._autosave.move(file, self._snapshot)
        self._write()

    def close(self) -> None:
        """Release the file in which the conversation is kept, after the answer under way.

        Raises:
            SessionError: The last messages cannot be written; the file is released all the same.
            DiskFullError: Likewise.
        """
        with self._turns.take():
            self._autosave.close(self._snapshot)

    def save(self, file: Path | str) -> None:
        """Write the conversation to a file, completely or not at all.

        It gets an id of its own there, unless this session is kept in that file.

        Args:
            file: A JSON file.

        Raises:
            SessionError: The file cannot be written.
            DiskFullError: The disk filled up.
        """
        file = Path(file).expanduser()
        if self._autosave.keeps(file):
            self._autosave.save(self._snapshot)
        else:
            replace(self._snapshot(), id=copy_id(self.conversation.id, file)).write(file)

    @classmethod
    def load(
        cls,
        engine: ChattingEngine,
        file: Path | str,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> "Session":
        """Go on with a conversation that was saved. Raises SessionError.

        chat_template_kwargs: See `Engine.chat`.
        """
        session = engine.chat(chat_template_kwargs=chat_template_kwargs)
        session.resume(Conversation.read(Path(file).expanduser()))
        return session

    def resume(self, conversation: Conversation, file: Path | None = None) -> None:
        """Continue another conversation, on this engine.

        Args:
            conversation: The other one.
            file: Where it is kept from now on. It holds the conversation already, so it is not written before
                the next change. Default None: nowhere.

        Raises:
            RequestError: An answer is under way, or this session keeps that file already.
            SessionError: Another session uses the file, or the file before cannot be written.
            DiskFullError: The file before cannot be written.
        """
        with self._turns.take(wait=False):
            if file is not None and self._autosave.keeps(file):
                # What was read from it may lack what could not be written lately.
                raise RequestError(f"the conversation in {file} is the one that goes on here already")
            self._autosave.move(file, self._snapshot)
            self._take_up(conversation)

    def _question(self, text: str) -> Ask:
        return lambda params: (with_question(self.conversation.tree, text), params)

    def _other_question(self, text: str) -> Ask:
        return lambda params: (with_other_question(self.conversation.tree, text), params)

    def _again(self, params: SamplingParams) -> tuple[MessageTree, SamplingParams]:
        tree = self.conversation.tree
        return to_answer_again(tree), seeded_anew(params, tree)

    def _answer_in_thread(
        self, ask: Ask, given: SamplingParams | None, trees: bool
    ) -> AsyncGenerator[Event, None]:
        halt = self._halts.new()
        return in_thread(lambda: self._run(ask, given, halt, trees=trees), halt.set)
