"""A conversation with an engine: questions in, events out, and what was said kept in a file as it comes."""

import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from offspec.chat.autosave import Autosave
from offspec.chat.conversation import Conversation, copy_id
from offspec.chat.message import Message, checked_text
from offspec.chat.prompt_reuse import Encoded, PromptReuse, Wording
from offspec.chat.turns import (
    PartialAnswer,
    asked,
    seeded_anew,
    with_other_question,
    with_question,
    without_answer,
)
from offspec.core.config import SamplingParams
from offspec.core.errors import ClosedError, OffspecError, RequestError
from offspec.core.events import Event, Finished, Notice, Result
from offspec.core.threads import ExclusiveUse, in_thread

_CHARACTERS = 4  # of a token, about

_Asked = tuple[list[Message], SamplingParams]
_Ask = Callable[[], _Asked]  # called when its turn has come


class AnsweringEngine(Protocol):
    """What a session needs of an engine; `offspec.Engine` is one."""

    @property
    def context(self) -> int: ...
    def stream(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        halt: threading.Event | None = None,
        trees: bool = False,
    ) -> Generator[Event, None, None]: ...


class ChattingEngine(Protocol):
    """An engine that begins conversations."""

    def chat(self, *, system: str | None = None, params: SamplingParams | None = None) -> "Session": ...


class Session:
    """One conversation. Several threads may use it; their questions wait for each other.

    A question that is refused, with a RequestError before its first pass, leaves the conversation as it was.
    After a later error, the question and the text of the answer so far stay in it.

    Args:
        engine: Answers token ids.
        wording: The tokenizer and chat template of that engine.
        conversation: What has been said.
    """

    def __init__(self, engine: AnsweringEngine, wording: Wording, conversation: Conversation) -> None:
        """engine: answers token ids; wording: its tokenizer and chat template."""
        self.conversation = conversation
        self.last: Result | None = None  # of the last answer that came to its end
        self._engine = engine
        self._prompts = PromptReuse(wording)
        self._autosave = Autosave()
        self._turns = ExclusiveUse(
            "an answer of this conversation is under way; stop it, or read it to its end"
        )
        self._halts: weakref.WeakSet[threading.Event] = weakref.WeakSet()
        self._halting = threading.Lock()
        self._coming: PartialAnswer | None = None
        self._used = self._estimate()
        # The seed that was fixed for the last answer, and the one that it was made with after some retries.
        self._seeds: tuple[int | None, int | None] = (None, None)

    @property
    def messages(self) -> tuple[Message, ...]:
        """Questions and answers, without the one that is coming."""
        return tuple(self.conversation.messages)

    @property
    def params(self) -> SamplingParams:
        """How the next answers are chosen. May be set at any time; an answer under way does not change."""
        return self.conversation.params

    @params.setter
    def params(self, params: SamplingParams) -> None:
        self.conversation.params = params
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
            self._write()

    @property
    def context(self) -> int:
        """Tokens that a conversation and its next answer may have together."""
        return self._engine.context

    @property
    def used(self) -> int:
        """Tokens of the conversation, with those of the answer under way.

        An estimate until the next question, where the conversation was resumed or changed since the last one:
        counting a long one takes a while.
        """
        coming = self._coming
        return self._used + (len(coming.ids) if coming else 0)

    @property
    def opened(self) -> str:
        """What the template began the answer under way with, such as "<think>"; "" where there is none."""
        coming = self._coming
        return coming.opened if coming else ""

    @property
    def busy(self) -> bool:
        """Whether an answer is under way."""
        return self._turns.taken

    def send(self, text: str, *, trees: bool = False) -> Generator[Event, None, None]:
        """Ask, and yield the events of the answer as `Engine.stream` does.

        Where the conversation cannot be saved, a Notice says so once, and the answer continues. A generator
        that is closed early halts the answer; the text so far is kept.

        Args:
            text: The question.
            trees: Send a TreeSeen for every pass. Default False.

        Raises:
            OffspecError: See `offspec.core.errors`.
        """
        return self._answer(self._question(text), trees, self._halt())

    def retry(self, *, trees: bool = False) -> Generator[Event, None, None]:
        """As `send`, for another answer in place of the last.

        A fixed seed increases by one each time, from the seed of the answer that is replaced.
        """
        return self._answer(self._again, trees, self._halt())

    def edit(self, text: str, *, trees: bool = False) -> Generator[Event, None, None]:
        """As `send`, in place of the last question and its answer, which stay where this one is refused."""
        return self._answer(self._other_question(text), trees, self._halt())

    def asend(self, text: str, *, trees: bool = False) -> AsyncGenerator[Event, None]:
        """`send` for `async` callers. Cancelled or closed, it halts the answer; the text so far is kept."""
        return self._answer_in_thread(self._question(text), trees)

    def aretry(self, *, trees: bool = False) -> AsyncGenerator[Event, None]:
        """`retry` for `async` callers; see `asend`."""
        return self._answer_in_thread(self._again, trees)

    def aedit(self, text: str, *, trees: bool = False) -> AsyncGenerator[Event, None]:
        """`edit` for `async` callers; see `asend`."""
        return self._answer_in_thread(self._other_question(text), trees)

    def stop(self) -> None:
        """Halt the answer under way, and those that wait for it, from any thread. The text so far is kept."""
        with self._halting:
            for halt in self._halts:
                halt.set()

    def rewind(self, turns: int = 1) -> tuple[Message, ...]:
        """Remove the last questions with their answers, and return them.

        Args:
            turns: How many questions. Default 1.

        Raises:
            RequestError: There are fewer, or an answer is under way.
        """
        with self._turns.take(wait=False):
            messages = self.messages
            questions = asked(messages)
            if not 1 <= turns <= len(questions):
                raise RequestError(
                    f"cannot take back {turns} questions; the conversation has {len(questions)}"
                    if questions
                    else "there is no question to take back"
                )
            at = questions[-turns]
            self.conversation.change(messages[:at])
            self._used = self._count()
            self._autosave.write(self._snapshot)
            return messages[at:]

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
            self.conversation = Conversation(model=old.model, system=old.system, params=old.params)
            self.last, self._used = None, 0

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
    def load(cls, engine: ChattingEngine, file: Path | str) -> "Session":
        """Go on with a conversation that was saved. Raises SessionError."""
        session = engine.chat()
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
            model, other = self.conversation.model, conversation.model
            conversation.model = model
            conversation.messages = [
                message if model == other and self._knows(message) else replace(message, token_ids=None)
                for message in conversation.messages
            ]
            self.conversation, self.last, self._seeds = conversation, None, (None, None)
            self._used = self._estimate()

    def _halt(self) -> threading.Event:
        halt = threading.Event()
        with self._halting:
            self._halts.add(halt)
        return halt

    def _question(self, text: str) -> _Ask:
        return lambda: (with_question(self.messages, text), self.params)

    def _other_question(self, text: str) -> _Ask:
        return lambda: (with_other_question(self.messages, text), self.params)

    def _again(self) -> _Asked:
        messages = without_answer(self.messages)
        return messages, seeded_anew(self.params, self.messages[-1], self._seeds)

    def _answer_in_thread(self, ask: _Ask, trees: bool) -> AsyncGenerator[Event, None]:
        halt = self._halt()
        return in_thread(lambda: self._answer(ask, trees, halt), halt.set)

    def _answer(self, ask: _Ask, trees: bool, halt: threading.Event) -> Generator[Event, None, None]:
        with self._turns.take(halt):
            messages, params = ask()
            encoded = self._encode(messages)
            coming = PartialAnswer(params.seed, encoded.opened)
            events = self._engine.stream(encoded.ids, params, halt=halt, trees=trees)
            with closing(events), self._recorded(messages, coming, len(encoded.ids)):
                try:
                    for event in events:
                        coming.hear(event)
                        if isinstance(event, Finished):
                            break
                        yield event
                        yield from self._notices()
                    else:
                        raise ClosedError(
                            "the engine was closed in the middle of the answer; load the model again"
                        )
                except GeneratorExit:
                    halt.set()
                    with suppress(OffspecError):  # there is no caller left to tell
                        for event in events:  # what was held back, and the end
                            coming.hear(event)
                    raise
        # The turn is over: who hears of the end may ask again at once.
        yield from self._notices()
        assert coming.result is not None
        yield Finished(coming.result)

    def _encode(self, messages: list[Message]) -> Encoded:
        """The prompt that these messages are. Raises RequestError where it leaves no room for an answer."""
        encoded = self._prompts.encode(replace(self.conversation, messages=messages))
        if len(encoded.ids) >= self.context:
            raise RequestError(
                f"the conversation has {len(encoded.ids):,} tokens with this question, and the context has "
                f"room for {self.context:,} with the answer; shorten it, take questions back, begin a new "
                "conversation, or load with a larger --context"
            )
        return encoded

    @contextmanager
    def _recorded(self, messages: list[Message], coming: PartialAnswer, tokens: int) -> Iterator[None]:
        """Keep the question before the block and the answer after it, however the block ends.

        tokens: of the prompt. Of what the engine refuses, before anything came, nothing is kept.
        """
        before, updated = self.conversation.messages, self.conversation.updated
        used, seed, refused = self._used, self.params.seed, False
        self.conversation.change(messages)
        self._autosave.write(self._snapshot)
        self._coming, self._used = coming, tokens
        try:
            with self._autosave.meanwhile(self._snapshot):
                yield
        except (RequestError, ClosedError):
            refused = not coming.begun
            raise
        except (GeneratorExit, KeyboardInterrupt):
            if coming.result is None:
                coming.finish = "halted"
            raise
        finally:
            self.conversation.change(before if refused else [*messages, coming.message()])
            self._coming, self.last = None, coming.result or self.last
            if refused:
                self._used, self.conversation.updated = used, updated
            else:
                self._used, self._seeds = tokens + len(coming.ids), (seed, coming.seed)
            if self.messages:
                self._autosave.write(self._snapshot)
            else:
                self._autosave.erase()

    def _snapshot(self) -> Conversation:
        """The conversation with what came of its next answer."""
        coming, messages = self._coming, self.conversation.messages
        if coming and messages and messages[-1].role == "user":
            messages = messages + coming.so_far()
        return replace(self.conversation, messages=messages)

    def _notices(self) -> Iterator[Notice]:
        trouble = self._autosave.trouble()
        return iter([Notice(trouble)] if trouble else [])

    def _write(self) -> None:
        """Write what was set between questions. A conversation in which nothing was said has no file."""
        if self.messages:
            self._autosave.write(self._snapshot)

    def _knows(self, message: Message) -> bool:
        return not message.token_ids or self._prompts.knows(max(message.token_ids))

    def _estimate(self) -> int:
        """About how many tokens the conversation has, without making any."""
        said = (m.token_ids or m.content[::_CHARACTERS] for m in self.messages)
        return sum(map(len, said))

    def _count(self) -> int:
        """Tokens of the conversation, 0 where its chat template cannot say."""
        try:
            return len(self._prompts.encode(self.conversation).ids) if self.conversation.messages else 0
        except OffspecError:
            return 0
