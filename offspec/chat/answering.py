"""One turn of a conversation: the engine is asked, and what comes is kept as it comes."""

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Protocol

from offspec.chat.autosave import Autosave
from offspec.chat.branches import MessageTree
from offspec.chat.conversation import Conversation
from offspec.chat.message import Message
from offspec.chat.prompt_reuse import ContextWindow, PromptReuse, Wording
from offspec.chat.turns import PartialAnswer
from offspec.core.config import SamplingParams, checked_params
from offspec.core.errors import ClosedError, OffspecError, RequestError
from offspec.core.events import Event, Finished, Notice, Result
from offspec.core.threads import ExclusiveUse, Halts

_CHARACTERS = 4  # of a token, about


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


@dataclass(frozen=True, slots=True)
class _Turn:
    """A question under way. before: the conversation until then; asked: with the question at its end."""

    before: MessageTree
    asked: MessageTree
    answer: PartialAnswer

    @property
    def says_nothing_new(self) -> bool:
        """Another answer to a question that has one is wanted, and nothing of it came."""
        count = len(self.asked.messages)
        again = count < len(self.before.messages) and self.before.messages[:count] == self.asked.messages
        return again and self.answer.empty

    def tree(self, finish: str | None) -> MessageTree:
        """The conversation with what came of the answer. finish: why it ended; None while it comes."""
        if self.says_nothing_new:
            return self.before
        if finish is None and self.answer.empty:
            return self.asked
        return self.asked.extended(self.answer.message(finish))


Ask = Callable[[SamplingParams], tuple[MessageTree, SamplingParams]]  # called when its turn has come


class Answering:
    """A conversation whose engine gives one answer after the other; see `Session`."""

    def __init__(self, engine: AnsweringEngine, wording: Wording, conversation: Conversation) -> None:
        self._engine, self._conversation = engine, conversation
        self._last: Result | None = None
        self._autosave = Autosave()
        # Of answers, and of changes to the conversation.
        self._turns = ExclusiveUse(
            "an answer of this conversation is under way; stop it, or read it to its end"
        )
        self._halts = Halts()
        self._listener: Callable[[Event | None], None] = lambda event: None
        self._wording, self._prompts = wording, PromptReuse(wording)
        self._window, self._told = ContextWindow(self._prompts), 0  # questions that were told to be left out
        self._turn: _Turn | None = None
        self._used, self._counted = self._estimate(), False

    @property
    def conversation(self) -> Conversation:
        """What was said, and how it goes on."""
        return self._conversation

    @property
    def last(self) -> Result | None:
        """The result of the last answer that came to its end."""
        return self._last

    @property
    def context(self) -> int:
        """Tokens that a conversation and its next answer may have together."""
        return self._engine.context

    @property
    def used(self) -> int:
        """Tokens of the conversation that go into the prompt, with those of the answer under way.

        An estimate where the conversation was resumed or its system message changed, until `recount` or the
        next question: counting a long one takes a while.
        """
        turn = self._turn
        return self._used + (len(turn.answer.ids) if turn else 0)

    @property
    def left_out(self) -> int:
        """Questions at the beginning that the last prompt left out, as the context had no room for them."""
        return self._window.left_out

    @property
    def opened(self) -> str:
        """Text with which the template began this answer, such as "<think>"; "" where there is none."""
        turn = self._turn
        return turn.answer.opened if turn else ""

    @property
    def busy(self) -> bool:
        """Whether an answer is under way."""
        return self._turns.taken

    def listen(self, listener: Callable[[Event | None], None]) -> None:
        """Have a function take each event of the answers before their reader does, and None at their end."""
        self._listener = listener

    def recount(self) -> None:
        """Make `used` a count where it is an estimate. Takes about half a second for 100,000 tokens.

        Raises RequestError while an answer is under way, which counts as well.
        """
        with self._turns.take(wait=False):
            if not self._counted:
                self._used, self._counted = self._count_all(), True

    def count(self, text: str) -> int:
        """Tokens of a text by itself. Raises RequestError while an answer is under way."""
        with self._turns.take(wait=False):
            return len(self._wording.tokenize(text))

    def stop(self) -> None:
        """Halt the answer under way, and those that wait for it, from any thread. The text so far is kept."""
        self._halts.set()

    def _snapshot(self) -> Conversation:
        """The conversation with what came of its next answer."""
        turn = self._turn
        if turn is None:
            return self.conversation
        tree = turn.tree(None)
        return replace(self.conversation, messages=list(tree.messages), branches=tree.branches)

    def _write(self) -> None:
        """Write what was set between questions. A conversation in which nothing was said has no file."""
        if self.conversation.messages:
            self._autosave.write(self._snapshot)

    def _change(self, tree: MessageTree) -> None:
        """Go on with other messages and branches, and write them."""
        self.conversation.change(tree.messages, tree.branches)
        self._used, self._counted = self._count_all(), True
        self._autosave.write(self._snapshot)

    def _take_up(self, conversation: Conversation) -> None:
        """Go on with another conversation. Answers lose the tokens that this model did not say."""
        model, other = self.conversation.model, conversation.model
        tree = conversation.tree.map(
            lambda said: said if model == other and self._knows(said) else replace(said, token_ids=None)
        )
        conversation.model = model
        conversation.messages, conversation.branches = list(tree.messages), tree.branches
        self._conversation, self._last = conversation, None
        self._window, self._told = ContextWindow(self._prompts), 0
        self._used, self._counted = self._estimate(), False

    def _run(
        self, ask: Ask, given: SamplingParams | None, halt: threading.Event, *, trees: bool
    ) -> Generator[Event, None, None]:
        """The events of an answer, once its turn has come.

        Args:
            ask: Returns the conversation with the question at its end, and how tokens are chosen.
            given: How tokens are chosen; None: by the conversation's parameters.
            halt: Ends the answer once it is set.
            trees: Send a TreeSeen for every pass.
        """
        with self._turns.take(halt):
            asked, params = ask(checked_params(self.conversation.params if given is None else given))
            conversation = replace(self.conversation, messages=list(asked.messages))
            encoded = self._window.encode(conversation, self._engine.context)
            coming = PartialAnswer(params.seed, encoded.opened)
            events = self._engine.stream(encoded.ids, params, halt=halt, trees=trees)
            with closing(events), self._recorded(asked, coming, len(encoded.ids)):
                try:
                    for event in events:
                        coming.hear(event)
                        self._listener(event)
                        if isinstance(event, Finished):
                            break
                        yield event
                        yield from self._notices()
                except GeneratorExit:
                    halt.set()
                    with suppress(OffspecError):  # there is no caller left to tell
                        for event in events:  # what was held back, and the end
                            coming.hear(event)
                    raise
                finally:
                    self._listener(None)
                if coming.result is None:
                    raise ClosedError(
                        "the engine was closed in the middle of the answer; load the model again"
                    )
        # The turn is over: at the end of the events the caller may ask again at once.
        yield from self._notices()
        yield Finished(coming.result)

    def _notices(self) -> Iterator[Notice]:
        """What the user should know of the prompt, and of the file."""
        told, self._told = self._told, self.left_out
        if self.left_out > told:
            first = (
                "the first question is" if self.left_out == 1 else f"the first {self.left_out} questions are"
            )
            yield Notice(f"{first} left out: the context has room for {self._engine.context:,} tokens")
        if trouble := self._autosave.trouble():
            yield Notice(trouble, urgent=True)

    @contextmanager
    def _recorded(self, asked: MessageTree, coming: PartialAnswer, tokens: int) -> Iterator[None]:
        """Keep the question before the block and the answer after it, however the block ends.

        tokens: of the prompt. Of what the engine refuses, before anything came, nothing is kept.
        """
        turn = _Turn(self.conversation.tree, asked, coming)
        updated, used, refused = self.conversation.updated, (self._used, self._counted), False
        self._turn, self._used, self._counted = turn, tokens, True
        self._keep(turn.tree(None))
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
            unchanged = refused or turn.says_nothing_new
            self._turn, self._last = None, coming.result or self._last
            self._used, self._counted = used if unchanged else (tokens + len(coming.ids), True)
            self._keep(turn.before if unchanged else turn.tree(coming.finish), updated if unchanged else None)

    def _keep(self, tree: MessageTree, updated: str | None = None) -> None:
        """Write this. updated: when it last changed, where that is not now."""
        self.conversation.change(tree.messages, tree.branches)
        self.conversation.updated = updated or self.conversation.updated
        if tree.messages:
            self._autosave.write(self._snapshot)
        else:
            self._autosave.erase()

    def _knows(self, message: Message) -> bool:
        return not message.token_ids or self._prompts.knows(max(message.token_ids))

    def _estimate(self) -> int:
        """About how many tokens the conversation has, without making any."""
        said = (m.token_ids or m.content[::_CHARACTERS] for m in self.conversation.messages)
        return min(sum(map(len, said)), self._engine.context)

    def _count_all(self) -> int:
        """Tokens of the conversation as `_run` leaves it: of a prompt, and of the answer to it."""
        talk, answered = self.conversation, 0
        if not talk.messages:
            return 0
        last = talk.messages[-1]
        if last.role == "assistant":
            talk = replace(talk, messages=talk.messages[:-1])
            answered = (
                len(self._wording.tokenize(last.content)) if last.token_ids is None else len(last.token_ids)
            )
        try:
            return len(self._window.encode(talk, self._engine.context).ids) + answered
        except OffspecError:  # the chat template refuses it, or the last question has no room
            return self._estimate()
