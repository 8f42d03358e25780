"""A conversation as token ids that begin as they did before.

A chat template renders the whole conversation again for every question. Tokenised again, an answer need not
come out in the tokens that it was generated with, and from there on the engine's caches would be of no use.
So the ids are continued: where a new text begins with one whose ids are known, only the rest is tokenised.

The first turns are left out where the context would be full, and so many at once that a quarter of it is
free again: then the prompt begins differently once, and not at every question. Nothing is removed from the
conversation.
"""

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Protocol

from offspec.chat.conversation import Conversation, Message
from offspec.chat.turns import asked
from offspec.core.errors import ContextLengthError

_PIECE = 2**16  # characters that are tokenised at once, whatever comes behind them
_ANCHOR = 16  # characters or tokens in front of others that show a tokenizer where those stand
_ANSWER = 8  # an answer should have this part of the context
_FREE = 4  # and this part is free once turns were left out
OPENED = re.compile(r"<(?:think|thinking|reasoning)>\s*\Z")


class Wording(Protocol):
    """A tokenizer with its chat template; `offspec.text.TextCodec` is one."""

    def render(self, messages: Sequence[Mapping[str, str]]) -> str: ...
    def tokenize(self, text: str) -> list[int]: ...
    def spell(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt. opened: what it begins the answer with, "<think>" and what follows it, or ""."""

    ids: list[int]
    opened: str


@dataclass(frozen=True, slots=True)
class _Mark:
    """The first `messages` of the conversation are the first `chars` of the text and `tokens` of the ids."""

    messages: int
    chars: int
    tokens: int


class PromptReuse:
    """What was rendered of one conversation, the ids of it, and the places where it can be taken up again."""

    def __init__(self, wording: Wording) -> None:
        self._wording = wording
        self._system: str | None = None
        self._messages: list[Message] = []
        self._text = ""
        self._ids: list[int] = []
        self._places: list[_Mark] = []

    def encode(self, conversation: Conversation) -> Encoded:
        """The prompt that asks for the next answer. Raises RequestError where the template refuses it."""
        self._return_to(conversation)
        messages = conversation.messages
        for index in range(self._covered, len(messages)):
            message = messages[index]
            if message.token_ids and message.content.strip():
                if self._covered < index:
                    self._continue_to(self._wording.render(conversation.prompt(index)), index)
                self._say(message.token_ids, index + 1)
        self._continue_to(self._wording.render(conversation.prompt()), len(messages))
        self._system, self._messages = conversation.system, list(messages)
        opened = OPENED.search(self._text)
        return Encoded(list(self._ids), opened[0] if opened else "")

    def exceeds(self, text: str, most: int) -> bool:
        """Whether a text has far more tokens than `most`, found out without making all of them.

        A megabyte of text takes two seconds and a hundred megabytes of memory, and may be one of thousands.
        """
        if len(text) <= _PIECE:
            return False
        count = 0
        for start in range(0, len(text), _PIECE):
            count += len(self._wording.tokenize(text[start : start + _PIECE]))
            if count > 2 * most:
                return True
        return False

    def knows(self, token: int) -> bool:
        """Whether the vocabulary has this token: one that it lacks is spelt as nothing, or with an error."""
        try:
            return bool(self._wording.spell([token, token]))  # alone, one that is a space may be nothing too
        except Exception:  # tokenizers raise whatever comes to them
            return False

    @property
    def _covered(self) -> int:
        """Messages that the text holds."""
        return self._places[-1].messages if self._places else 0

    def _return_to(self, conversation: Conversation) -> None:
        """Back to what this conversation shares with the one that was encoded last."""
        pairs = zip(self._messages, conversation.messages, strict=False)
        same = takewhile(lambda pair: pair[0] == pair[1], pairs)
        shared = len(list(same)) if conversation.system == self._system else 0
        self._messages = self._messages[:shared]
        while self._places and self._places[-1].messages > shared:
            self._places.pop()
        self._cut()

    def _cut(self) -> None:
        end = self._places[-1] if self._places else _Mark(0, 0, 0)
        self._text, self._ids = self._text[: end.chars], self._ids[: end.tokens]

    def _continue_to(self, text: str, messages: int) -> None:
        """Make `text` the text, keeping the ids of what it begins with.

        A template may leave out of an answer what it thought, or spaces; then it is tokenised from there on.
        """
        while self._places and not text.startswith(self._text[: self._places[-1].chars]):
            self._places.pop()
        self._cut()
        self._ids += self._tokens_after(self._text, text[len(self._text) :])
        self._text = text
        self._places.append(_Mark(messages, len(text), len(self._ids)))

    def _tokens_after(self, before: str, rest: str) -> list[int]:
        """The ids of `rest` where it stands: at the start of a text some tokenizers would add a space."""
        anchor = before[-_ANCHOR:]
        if not (anchor and rest):
            return self._wording.tokenize(rest) if rest else []
        known, both = self._wording.tokenize(anchor), self._wording.tokenize(anchor + rest)
        return both[len(known) :] if both[: len(known)] == known else self._wording.tokenize(rest)

    def _say(self, ids: tuple[int, ...], messages: int) -> None:
        """Add an answer in its own tokens, with a place before the last, which the template may not write."""
        whole, most = self._spelt(ids), self._spelt(ids[:-1])
        if not whole:
            return
        chars, tokens = len(self._text), len(self._ids) + len(ids)
        if most and whole.startswith(most):
            self._places.append(_Mark(messages, chars + len(most), tokens - 1))
        self._places.append(_Mark(messages, chars + len(whole), tokens))
        self._text += whole
        self._ids += ids

    def _spelt(self, ids: Sequence[int]) -> str:
        """The text of ids where they follow: at the start of a text some tokenizers would drop its space."""
        anchor = self._ids[-_ANCHOR:]
        try:
            known, both = self._wording.spell(anchor), self._wording.spell([*anchor, *ids])
            return both[len(known) :] if both.startswith(known) else self._wording.spell(ids)
        except Exception:  # ids of another model's, for which tokenizers raise whatever comes to them
            return ""


class ContextWindow:
    """Encodes conversations, of which it leaves out the beginning where that is needed.

    left_out: questions at the beginning that the last prompt left out.
    """

    def __init__(self, prompts: PromptReuse) -> None:
        self._prompts = prompts
        self._start = 0  # where the first question of the prompt is in the messages
        self._seen: list[Message] = []  # the messages that were encoded last
        self.left_out = 0

    def encode(self, conversation: Conversation, context: int) -> Encoded:
        """The prompt that asks for the next answer.

        Args:
            conversation: With the question at its end.
            context: Tokens that a prompt and its answer may have together.

        Raises:
            ContextLengthError: The last question alone leaves no room for an answer.
            RequestError: The template refuses it.
        """
        messages = conversation.messages
        questions = asked(messages)
        if messages and self._prompts.exceeds(messages[-1].content, context):
            raise ContextLengthError(
                f"the question has more than {2 * context:,} tokens, and the context has room for "
                f"{context:,} with the answer; shorten it, or load with a larger `context`"
            )
        encoded, start = self._encode_from(self._kept_start(conversation, context), conversation)
        if len(encoded.ids) > context - context // _ANSWER and (later := [q for q in questions if q > start]):
            room = context - context // _FREE
            index = bisect_left(later, True, key=lambda q: self._tokens_from(q, conversation) <= room)
            encoded, start = self._encode_from(later[min(index, len(later) - 1)], conversation)
        if len(encoded.ids) >= context:
            with_system = " with the system message" if conversation.system else ""
            raise ContextLengthError(
                f"the question has {len(encoded.ids):,} tokens{with_system}, and the context has room for "
                f"{context:,} with the answer; shorten it, or load with a larger `context`"
            )
        self._start, self._seen = start, list(messages)
        self.left_out = sum(q < start for q in questions)
        return encoded

    def _kept_start(self, conversation: Conversation, context: int) -> int:
        """The start of the last prompt, while the conversation only continues or the whole has no room."""
        continues = conversation.messages[: len(self._seen)] == self._seen
        if not self._start or continues:
            return self._start
        same = conversation.messages[: self._start] == self._seen[: self._start]
        fits = self._tokens_from(0, conversation) <= context - context // _FREE
        return self._start if same and len(conversation.messages) > self._start and not fits else 0

    def _tokens_from(self, start: int, conversation: Conversation) -> int:
        return len(self._encode_from(start, conversation)[0].ids)

    def _encode_from(self, start: int, conversation: Conversation) -> tuple[Encoded, int]:
        """The prompt of the messages from there on, and where that is."""
        return self._prompts.encode(replace(conversation, messages=conversation.messages[start:])), start
