"""Base of sessions: generates the answer of a turn and saves it during generation."""

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Protocol

from offspec.chat.autosave import Autosave
from offspec.chat.branches import MessageTree
from offspec.chat.conversation import Conversation
from offspec.chat.message import Message
from offspec.chat.prompt_reuse import ChatTokenizer, ContextWindow, PromptReuse
from offspec.chat.turns import PartialAnswer
from offspec.core.config import SamplingParams, checked_params
from offspec.core.errors import ClosedError, OffspecError, RequestError
from offspec.core.events import Event, Finished, Notice, Result
from offspec.core.threads import ExclusiveUse, StopEvents

_CHARACTERS = 4  # approximate number of characters per token


class StreamingEngine(Protocol):
    """Engine interface that a session needs; `offspec.Engine` implements it."""

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


@dataclass(frozen=True, slots=True)
class _Turn:
    """Turn in progress.

    before: conversation before the turn. question: conversation with the question added.
    """

    before: MessageTree
    question: MessageTree
    answer: PartialAnswer

    @property
    def is_empty_retry(self) -> bool:
        """Whether this is a retry that has produced no tokens."""
        count = len(self.question.messages)
        again = count < len(self.before.messages) and self.before.messages[:count] == self.question.messages
        return again and self.answer.is_empty

    def tree(self, finish: str | None) -> MessageTree:
        """Return the conversation with the answer so far. finish: reason for its end, or None."""
        if self.is_empty_retry:
            return self.before
        if finish is None and self.answer.is_empty:
            return self.question
        return self.question.extended(self.answer.message(finish))


BuildTurn = Callable[[SamplingParams], tuple[MessageTree, SamplingParams]]  # called when the turn begins


class SessionBase:
    """Conversation whose engine generates one answer at a time; see `Session`."""

    def __init__(self, engine: StreamingEngine, tokenizer: ChatTokenizer, conversation: Conversation) -> None:
        self._engine, self._conversation = engine, conversation
        self._last: Result | None = None
        self._autosave = Autosave()
        # For answers, and for changes to the conversation.
        self._turns = ExclusiveUse(
            "an answer of this conversation is in progress; stop it, or read it to its end"
        )
        self._halts = StopEvents()
        self._listener: Callable[[Event | None], None] = lambda event: None
        self._tokenizer, self._prompts = tokenizer, PromptReuse(tokenizer)
        self._window = ContextWindow(self._prompts)
        self._reported_left_out = 0  # number of dropped questions in the last notice
        self._turn: _Turn | None = None
        self._used, self._counted = self._estimate(), False

    @property
    def conversation(self) -> Conversation:
        """The conversation, with its parameters."""
        return self._conversation

    @property
    def last(self) -> Result | None:
        """Result of the last finished answer."""
        return self._last

    @property
    def context(self) -> int:
        """Context size in tokens, for a conversation and its next answer together."""
        return self._engine.context

    @property
    def used(self) -> int:
        """Tokens of the conversation in the prompt, plus tokens of the current answer.

        After the conversation was resumed or its system message changed, this is an estimate until `recount`
        or the next question, because counting a long conversation takes a while.
        """
        turn = self._turn
        return self._used + (len(turn.answer.ids) if turn else 0)

    @property
    def left_out(self) -> int:
        """Number of first questions that were dropped from the last prompt to fit the context."""
        return self._window.left_out

    @property
    def opened(self) -> str:
        """Text with which the template began the current answer, such as "<think>", or ""."""
        turn = self._turn
        return turn.answer.opened if turn else ""

    @property
    def busy(self) -> bool:
        """Whether an answer is in progress."""
        return self._turns.locked

    def listen(self, listener: Callable[[Event | None], None]) -> None:
        """Call a function with each event before the reader gets it, and with None at an answer's end."""
        self._listener = listener

    def recount(self) -> None:
        """Replace an estimate in `used` by a count. Takes about half a second for 100,000 tokens.

        Raises RequestError while an answer is in progress, which counts the tokens anyway.
        """
        with self._turns.take(wait=False):
            if not self._counted:
                self._used, self._counted = self._count_all(), True

    def count(self, text: str) -> int:
        """Return the number of tokens of a text. Raises RequestError while an answer is in progress."""
        with self._turns.take(wait=False):
            return len(self._tokenizer.tokenize(text))

    def stop(self) -> None:
        """Halt the current answer and all queued ones, from any thread. The text so far is kept."""
        self._halts.set()

    def _snapshot(self) -> Conversation:
        """Return the conversation with the current answer so far."""
        turn = self._turn
        if turn is None:
            return self.conversation
        tree = turn.tree(None)
        return replace(self.conversation, messages=list(tree.messages), branches=tree.branches)

    def _write(self) -> None:
        """Save changes made between questions. An empty conversation has no file."""
        if self.conversation.messages:
            self._autosave.write(self._snapshot)

    def _change(self, tree: MessageTree) -> None:
        """Replace messages and branches, and save them."""
        self.conversation.change(tree.messages, tree.branches)
        self._used, self._counted = self._count_all(), True
        self._autosave.write(self._snapshot)

    def _resume(self, conversation: Conversation) -> None:
        """Continue another conversation. Token ids that another model generated are removed."""
        model, other = self.conversation.model, conversation.model
        tree = conversation.tree.map(
            lambda each: each if model == other and self._has_tokens(each) else replace(each, token_ids=None)
        )
        conversation.model = model
        conversation.messages, conversation.branches = list(tree.messages), tree.branches
        self._conversation, self._last = conversation, None
        self._window, self._reported_left_out = ContextWindow(self._prompts), 0
        self._used, self._counted = self._estimate(), False

    def _run(
        self, build_turn: BuildTurn, params: SamplingParams | None, halt: threading.Event, *, trees: bool
    ) -> Generator[Event, None, None]:
        """Wait for earlier answers, then yield the events of an answer.

        Args:
            build_turn: Returns the conversation with the question added, and the sampling parameters.
            params: Sampling parameters; None for the conversation's parameters.
            halt: Event that ends the answer.
            trees: Whether to send a TreeSeen for every pass.
        """
        with self._turns.take(halt):
            question, params = build_turn(
                checked_params(self.conversation.params if params is None else params)
            )
            conversation = replace(self.conversation, messages=list(question.messages))
            encoded = self._window.encode(conversation, self._engine.context)
            answer = PartialAnswer(params.seed, encoded.opened)
            events = self._engine.stream(encoded.ids, params, halt=halt, trees=trees)
            with closing(events), self._recorded(question, answer, len(encoded.ids)):
                try:
                    for event in events:
                        answer.add(event)
                        self._listener(event)
                        if isinstance(event, Finished):
                            break
                        yield event
                        yield from self._notices()
                except GeneratorExit:
                    halt.set()
                    with suppress(OffspecError):  # no caller is left
                        for event in events:  # remaining events, and the end
                            answer.add(event)
                    raise
                finally:
                    self._listener(None)
                if answer.result is None:
                    raise ClosedError("the engine was closed during the answer; load the model again")
        # The turn is over here, so the caller can send the next question right after the last event.
        yield from self._notices()
        yield Finished(answer.result)

    def _notices(self) -> Iterator[Notice]:
        """Yield notices about dropped questions and about failed saves."""
        reported, self._reported_left_out = self._reported_left_out, self.left_out
        if self.left_out > reported:
            first = (
                "the first question is" if self.left_out == 1 else f"the first {self.left_out} questions are"
            )
            yield Notice(f"{first} left out: the context holds {self._engine.context:,} tokens")
        if trouble := self._autosave.take_warning():
            yield Notice(trouble, urgent=True)

    @contextmanager
    def _recorded(self, question: MessageTree, answer: PartialAnswer, tokens: int) -> Iterator[None]:
        """Save the question before the block and the answer after it, however the block ends.

        tokens: number of prompt tokens. A question that the engine refuses before any output is not kept.
        """
        turn = _Turn(self.conversation.tree, question, answer)
        updated, used, refused = self.conversation.updated, (self._used, self._counted), False
        self._turn, self._used, self._counted = turn, tokens, True
        self._keep(turn.tree(None))
        try:
            with self._autosave.write_periodically(self._snapshot):
                yield
        except (RequestError, ClosedError):
            refused = not answer.started
            raise
        except (GeneratorExit, KeyboardInterrupt):
            if answer.result is None:
                answer.finish = "halted"
            raise
        finally:
            unchanged = refused or turn.is_empty_retry
            self._turn, self._last = None, answer.result or self._last
            self._used, self._counted = used if unchanged else (tokens + len(answer.ids), True)
            self._keep(turn.before if unchanged else turn.tree(answer.finish), updated if unchanged else None)

    def _keep(self, tree: MessageTree, updated: str | None = None) -> None:
        """Replace the conversation's messages and save them. updated: time of the last change if not now."""
        self.conversation.change(tree.messages, tree.branches)
        self.conversation.updated = updated or self.conversation.updated
        if tree.messages:
            self._autosave.write(self._snapshot)
        else:
            self._autosave.delete_file()

    def _has_tokens(self, message: Message) -> bool:
        """Return whether the vocabulary has all tokens of an answer."""
        return not message.token_ids or self._prompts.has_token(max(message.token_ids))

    def _estimate(self) -> int:
        """Estimate the tokens of the conversation without tokenizing."""
        tokens = (m.token_ids or m.content[::_CHARACTERS] for m in self.conversation.messages)
        return min(sum(map(len, tokens)), self._engine.context)

    def _count_all(self) -> int:
        """Count the tokens of the last prompt and its answer, as after `_run`."""
        conversation, answer_tokens = self.conversation, 0
        if not conversation.messages:
            return 0
        last = conversation.messages[-1]
        if last.role == "assistant":
            conversation = replace(conversation, messages=conversation.messages[:-1])
            ids = self._tokenizer.tokenize(last.content) if last.token_ids is None else last.token_ids
            answer_tokens = len(ids)
        try:
            return len(self._window.encode(conversation, self._engine.context).ids) + answer_tokens
        except OffspecError:  # refused by the chat template, or the last question does not fit
            return self._estimate()
