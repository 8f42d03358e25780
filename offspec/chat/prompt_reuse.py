"""Prompt encoding that extends the token ids of earlier prompts, so that the KV cache stays usable.

A chat template renders the whole conversation again for every question. Tokenizing an answer again may give
other tokens than the generated ones, so the KV cache could not be used from there on. So if a new text begins
with a text whose ids are known, only the rest is tokenized.

If the context would be full, enough of the first turns are dropped from the prompt to free a quarter of it,
so that the start of the prompt rarely changes. Nothing is removed from the conversation.
"""

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Protocol

from offspec.chat.conversation import Conversation, Message
from offspec.chat.turns import question_indices
from offspec.core.errors import ContextLengthError

_PIECE = 2**16  # characters tokenized at once, regardless of the following text
_ANCHOR = 16  # preceding characters or tokens that give a tokenizer context
_ANSWER = 8  # 1/8 of the context is reserved for an answer
_FREE = 4  # 1/4 of the context is free after dropping turns
OPENED = re.compile(r"<(?:think|thinking|reasoning)>\s*\Z")


class ChatTokenizer(Protocol):
    """Tokenizer with its chat template; `offspec.text.TextCodec` implements it."""

    def render(self, messages: Sequence[Mapping[str, str]]) -> str: ...
    def tokenize(self, text: str) -> list[int]: ...
    def decode_with_special(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """Token ids of a prompt. `opened`: start of the answer, such as "<think>" and whitespace, or ""."""

    ids: list[int]
    opened: str


@dataclass(frozen=True, slots=True)
class _Mark:
    """Position after the first `messages` messages: `chars` characters of the text, `tokens` token ids."""

    messages: int
    chars: int
    tokens: int


class PromptReuse:
    """Rendered text and ids of a conversation, with the positions from which it can be continued."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._system: str | None = None
        self._messages: list[Message] = []
        self._text = ""
        self._ids: list[int] = []
        self._places: list[_Mark] = []

    def encode(self, conversation: Conversation) -> EncodedPrompt:
        """Return the prompt for the next answer. Raises RequestError if the template refuses it."""
        self._truncate_to_shared(conversation)
        messages = conversation.messages
        for index in range(self._covered, len(messages)):
            message = messages[index]
            if message.token_ids and message.content.strip():
                if self._covered < index:
                    self._extend_to(self._tokenizer.render(conversation.prompt(index)), index)
                self._append_answer(message.token_ids, index + 1)
        self._extend_to(self._tokenizer.render(conversation.prompt()), len(messages))
        self._system, self._messages = conversation.system, list(messages)
        opened = OPENED.search(self._text)
        return EncodedPrompt(list(self._ids), opened[0] if opened else "")

    def exceeds(self, text: str, most: int) -> bool:
        """Return whether a text has far more tokens than `most`, without tokenizing all of it.

        Tokenizing takes two seconds and 100 MB of memory per megabyte of text, which may be gigabytes long.
        """
        if len(text) <= _PIECE:
            return False
        count = 0
        for start in range(0, len(text), _PIECE):
            count += len(self._tokenizer.tokenize(text[start : start + _PIECE]))
            if count > 2 * most:
                return True
        return False

    def has_token(self, token: int) -> bool:
        """Return whether the vocabulary has this token; decoding others yields no text or raises."""
        try:
            return bool(
                self._tokenizer.decode_with_special([token, token])
            )  # twice, since a single space may decode to no text
        except Exception:  # the exception type depends on the tokenizer
            return False

    @property
    def _covered(self) -> int:
        """Number of messages in the text."""
        return self._places[-1].messages if self._places else 0

    def _truncate_to_shared(self, conversation: Conversation) -> None:
        """Truncate to the messages that this conversation shares with the one encoded last."""
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

    def _extend_to(self, text: str, messages: int) -> None:
        """Replace the text by `text`, keeping the ids of the common prefix.

        A template may omit reasoning or spaces of an answer; the text is tokenized again from there on.
        """
        while self._places and not text.startswith(self._text[: self._places[-1].chars]):
            self._places.pop()
        self._cut()
        self._ids += self._tokens_after(self._text, text[len(self._text) :])
        self._text = text
        self._places.append(_Mark(messages, len(text), len(self._ids)))

    def _tokens_after(self, before: str, rest: str) -> list[int]:
        """Return the ids of `rest` after `before`; at the start of a text some tokenizers add a space."""
        anchor = before[-_ANCHOR:]
        if not (anchor and rest):
            return self._tokenizer.tokenize(rest) if rest else []
        known, both = self._tokenizer.tokenize(anchor), self._tokenizer.tokenize(anchor + rest)
        return both[len(known) :] if both[: len(known)] == known else self._tokenizer.tokenize(rest)

    def _append_answer(self, ids: tuple[int, ...], messages: int) -> None:
        """Add an answer with its generated ids.

        The template may omit the last token, so the position before it is marked, too.
        """
        whole, most = self._decode(ids), self._decode(ids[:-1])
        if not whole:
            return
        chars, tokens = len(self._text), len(self._ids) + len(ids)
        if most and whole.startswith(most):
            self._places.append(_Mark(messages, chars + len(most), tokens - 1))
        self._places.append(_Mark(messages, chars + len(whole), tokens))
        self._text += whole
        self._ids += ids

    def _decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids after the known ids; at the start of a text some tokenizers drop a space."""
        anchor = self._ids[-_ANCHOR:]
        try:
            known, both = (
                self._tokenizer.decode_with_special(anchor),
                self._tokenizer.decode_with_special([*anchor, *ids]),
            )
            return both[len(known) :] if both.startswith(known) else self._tokenizer.decode_with_special(ids)
        except Exception:  # ids of another model; the exception type depends on the tokenizer
            return ""


class ContextWindow:
    """Encoder of conversations that drops the first turns if necessary to fit the context.

    Attributes:
        left_out: Number of questions dropped from the last prompt.
    """

    def __init__(self, prompts: PromptReuse) -> None:
        self._prompts = prompts
        self._start = 0  # index of the first question of the prompt in the messages
        self._seen: list[Message] = []  # messages encoded last
        self.left_out = 0

    def encode(self, conversation: Conversation, context: int) -> EncodedPrompt:
        """Return the prompt for the next answer.

        Args:
            conversation: The conversation; its last message is the question.
            context: Maximum tokens of prompt and answer.

        Raises:
            ContextLengthError: The last question alone leaves no room for an answer.
            RequestError: The chat template refuses the conversation.
        """
        messages = conversation.messages
        questions = question_indices(messages)
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
        """Return the start of the last prompt, or 0.

        The start is kept if the conversation continues the last prompt, or does not fit as a whole.
        """
        continues = conversation.messages[: len(self._seen)] == self._seen
        if not self._start or continues:
            return self._start
        same = conversation.messages[: self._start] == self._seen[: self._start]
        fits = self._tokens_from(0, conversation) <= context - context // _FREE
        return self._start if same and len(conversation.messages) > self._start and not fits else 0

    def _tokens_from(self, start: int, conversation: Conversation) -> int:
        return len(self._encode_from(start, conversation)[0].ids)

    def _encode_from(self, start: int, conversation: Conversation) -> tuple[EncodedPrompt, int]:
        """Return the prompt of the messages from `start` on, and `start`."""
        return self._prompts.encode(replace(conversation, messages=conversation.messages[start:])), start
