"""Conversation session with an engine, which yields events and saves the conversation during answers."""

from collections.abc import AsyncGenerator, Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from offspec.chat.branches import Fork, MessageTree
from offspec.chat.conversation import Conversation, copy_id
from offspec.chat.message import Message, checked_text
from offspec.chat.session_base import BuildTurn, SessionBase
from offspec.chat.turns import for_retry, rewind_index, with_edited_question, with_fresh_seed, with_question
from offspec.core.config import SamplingParams, checked_params
from offspec.core.errors import RequestError
from offspec.core.events import Event
from offspec.core.threads import stream_in_thread
from offspec_planners.units import format_count


class SessionEngine(Protocol):
    """Engine that can begin conversations."""

    def chat(self, *, chat_template_kwargs: Mapping[str, Any] | None = None) -> "Session": ...


class Session(SessionBase):
    """One conversation. Several threads may use it; their questions are answered one after the other.

    If a question is refused with a RequestError before its first pass, the conversation is unchanged. After a
    later error, the question and the text of the answer so far stay in the conversation.

    Args:
        engine: Engine that generates answers.
        tokenizer: Tokenizer of the engine's model, with its chat template.
        conversation: The conversation so far.
    """

    def __repr__(self) -> str:
        questions = format_count(self.conversation.turns, "question")
        return f"<Session, {questions}, {self.used} of {self.context} tokens>"

    @property
    def messages(self) -> tuple[Message, ...]:
        """Questions and answers, without the answer in progress."""
        return tuple(self.conversation.messages)

    @property
    def branches(self) -> tuple[Fork, ...]:
        """Turns with several versions, made by `retry` and `edit`, in the order of `messages`."""
        return self.conversation.tree.forks()

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters of the next answers. Setting them does not affect an answer in progress."""
        return self.conversation.params

    @params.setter
    def params(self, params: SamplingParams) -> None:
        self.conversation.params = checked_params(params)
        if not self.busy:  # otherwise they are written with the current answer
            self._write()

    @property
    def system(self) -> str | None:
        """System message.

        Setting it raises RequestError while an answer is in progress, or if the text is not valid Unicode.
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
        """Ask a question and yield the events of the answer, like `Engine.stream`.

        If the conversation cannot be saved, one Notice reports it, and the answer continues. Closing the
        generator early halts the answer; the text so far is kept. If the whole conversation does not fit the
        context, its first turns are left out of the prompt, and a Notice reports their number.

        Args:
            text: The question.
            params: Sampling parameters of this answer. None: the session's `params`.
            trees: Send a TreeSeen event for every pass. Default False.

        Raises:
            OffspecError: See `offspec.core.errors`.
        """
        return self._run(self._question(text), params, self._halts.new(), trees=trees)

    def retry(
        self, *, params: SamplingParams | None = None, trees: bool = False
    ) -> Generator[Event, None, None]:
        """Answer the last question again, like `send`; the previous answer is kept as a branch.

        If the new answer has no tokens, the previous one stays in place. A fixed seed is increased by one.
        """
        return self._run(self._again, params, self._halts.new(), trees=trees)

    def edit(
        self, text: str, *, params: SamplingParams | None = None, trees: bool = False
    ) -> Generator[Event, None, None]:
        """Ask another question in place of the last one, like `send`; the last turn is kept as a branch."""
        return self._run(self._other_question(text), params, self._halts.new(), trees=trees)

    def asend(
        self, text: str, *, params: SamplingParams | None = None, trees: bool = False
    ) -> AsyncGenerator[Event, None]:
        """Async version of `send`; cancelling or closing it halts the answer; the text so far is kept."""
        return self._answer_in_thread(self._question(text), params, trees)

    def aretry(
        self, *, params: SamplingParams | None = None, trees: bool = False
    ) -> AsyncGenerator[Event, None]:
        """Async version of `retry`; see `asend`."""
        return self._answer_in_thread(self._again, params, trees)

    def aedit(
        self, text: str, *, params: SamplingParams | None = None, trees: bool = False
    ) -> AsyncGenerator[Event, None]:
        """Async version of `edit`; see `asend`."""
        return self._answer_in_thread(self._other_question(text), params, trees)

    def rewind(self, turns: int = 1) -> tuple[Message, ...]:
        """Remove the last questions with their answers and other versions; return the removed messages.

        Args:
            turns: Number of questions. Default 1.

        Raises:
            RequestError: There are fewer questions, or an answer is in progress.
        """
        with self._turns.take(wait=False):
            tree = self.conversation.tree
            at = rewind_index(tree, turns)
            self._change(tree.cut(at))
            return tree.messages[at:]

    def switch(self, number: int, at: int | None = None) -> None:
        """Switch to another version of a turn and the messages that followed it.

        Args:
            number: Number of the version; 0 is the earliest.
            at: Index of the turn's question in `messages`. Default: the last turn of `branches`.

        Raises:
            RequestError: The version does not exist, or an answer is in progress.
        """
        with self._turns.take(wait=False):
            tree = self.conversation.tree
            fork = tree.fork(at)
            if not 0 <= number < len(fork.versions):
                raise RequestError(
                    f"version {number} does not exist; choose from 0 to {len(fork.versions) - 1}"
                )
            if number != fork.active:
                self._change(tree.switched(fork.at, number))

    def clear(self) -> None:
        """Begin a new conversation with the same system message and parameters; it is not saved yet.

        Raises:
            RequestError: An answer is in progress.
            SessionError: The file of the old conversation cannot be written; the old conversation continues.
            DiskFullError: The disk is full; the old conversation continues.
        """
        with self._turns.take(wait=False):
            old = self.conversation
            self._autosave.set_file(None, self._snapshot)
            self._resume(Conversation(model=old.model, system=old.system, params=old.params))

    def keep(self, file: Path | None) -> None:
        """Save the conversation to a file from now on, after each question and during answers.

        If the process is killed, no question and at most two seconds of an answer are lost. No other session,
        in this process or another, can use the same file until this one is closed, cleared, garbage-collected
        or kept in another file.

        Args:
            file: The file. None: stop saving.

        Raises:
            SessionError: Another session uses the file, or the previous file cannot be written.
            DiskFullError: The previous file cannot be written.
        """
        self._autosave.set_file(file, self._snapshot)
        self._write()

    def close(self) -> None:
        """Release the file in which the conversation is kept, after an answer in progress.

        Raises:
            SessionError: The last messages cannot be written; the file is released anyway.
            DiskFullError: The disk is full; the file is released anyway.
        """
        with self._turns.take():
            self._autosave.close(self._snapshot)

    def save(self, file: Path | str) -> None:
        """Write the conversation to a file atomically.

        The copy gets its own id, unless this session is kept in that file.

        Args:
            file: A JSON file.

        Raises:
            SessionError: The file cannot be written.
            DiskFullError: The disk is full.
        """
        file = Path(file).expanduser()
        if self._autosave.writes_to(file):
            self._autosave.save(self._snapshot)
        else:
            replace(self._snapshot(), id=copy_id(self.conversation.id, file)).write(file)

    @classmethod
    def load(
        cls,
        engine: SessionEngine,
        file: Path | str,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> "Session":
        """Return a session that continues a saved conversation. Raises SessionError.

        Args:
            engine: Engine that answers the next questions.
            file: A JSON file written by `save` or `keep`.
            chat_template_kwargs: See `Engine.chat`.
        """
        session = engine.chat(chat_template_kwargs=chat_template_kwargs)
        session.resume(Conversation.read(Path(file).expanduser()))
        return session

    def resume(self, conversation: Conversation, file: Path | None = None) -> None:
        """Continue another conversation in this session.

        Args:
            conversation: The other conversation.
            file: File in which it is kept from now on. The file already contains the conversation, so it is
                not written before the next change. Default None: no file.

        Raises:
            RequestError: An answer is in progress, or this session is already kept in that file.
            SessionError: Another session uses the file, or the previous file cannot be written.
            DiskFullError: The previous file cannot be written.
        """
        with self._turns.take(wait=False):
            if file is not None and self._autosave.writes_to(file):
                # The file may lack recent messages that could not be written.
                raise RequestError(f"the conversation in {file} is already open in this session")
            self._autosave.set_file(file, self._snapshot)
            self._resume(conversation)

    def _question(self, text: str) -> BuildTurn:
        return lambda params: (with_question(self.conversation.tree, text), params)

    def _other_question(self, text: str) -> BuildTurn:
        return lambda params: (with_edited_question(self.conversation.tree, text), params)

    def _again(self, params: SamplingParams) -> tuple[MessageTree, SamplingParams]:
        tree = self.conversation.tree
        return for_retry(tree), with_fresh_seed(params, tree)

    def _answer_in_thread(
        self, build_turn: BuildTurn, params: SamplingParams | None, trees: bool
    ) -> AsyncGenerator[Event, None]:
        halt = self._halts.new()
        return stream_in_thread(lambda: self._run(build_turn, params, halt, trees=trees), halt.set)
