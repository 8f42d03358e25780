"""Parser that splits the text of a choice into deltas of visible text, reasoning and tool calls."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

from offspec.chat.answer_parser import AnswerParser, AnswerPart, ReasoningPart, TextPart, ToolCall
from offspec.core.events import Result, TextDelta, TokenLogprobs
from offspec.server.protocol import (
    ChoiceFinished,
    ContentDelta,
    Delta,
    ReasoningDelta,
    TokenChoice,
    ToolCallDelta,
)

_LEAST = -9999.0  # log-probability of 0 in JSON, which cannot represent infinity


class OutputParser:
    """Parser of one choice.

    shown: see `AnswerParser`. reasoning_tokens: number of reasoning tokens, including marks. If a pass yields
    both reasoning and text, its tokens are divided in proportion to their characters.

    Args:
        choice: Number of the choice.
        parts: Parser that splits the text.
        tokens: Formatter of tokens.
        one_call: Whether to drop everything after the first call.
    """

    def __init__(
        self, choice: int, parts: AnswerParser, tokens: "TokenFormatter", one_call: bool = False
    ) -> None:
        self._choice, self._parts, self._tokens, self._one_call = choice, parts, tokens, one_call
        self.shown = parts.shown
        self._called = self.reasoning_tokens = 0

    @property
    def _complete(self) -> bool:
        """Whether the only allowed call has been parsed, so that the rest is dropped."""
        return self._one_call and self._called > 0

    def feed(self, delta: TextDelta) -> Iterator[ContentDelta | ReasoningDelta | ToolCallDelta]:
        """Yield the deltas of a piece of text. Its tokens are attached to the first visible text."""
        parts, token_ids = self._parts.feed(delta.text), delta.token_ids
        logprobs = tuple(map(self._tokens.describe, delta.logprobs))
        reasoning = sum(len(part.text) for part in parts if isinstance(part, ReasoningPart))
        if reasoning:
            total = reasoning + sum(len(part.text) for part in parts if isinstance(part, TextPart))
            self.reasoning_tokens += round(len(token_ids) * reasoning / total)
        if logprobs and not any(isinstance(part, TextPart) for part in parts):
            parts = [TextPart(""), *parts]
        for part in parts:
            if self._complete:
                return
            event = self._event(part)
            if isinstance(event, ContentDelta) and token_ids:
                event = ContentDelta(self._choice, event.text, token_ids, logprobs)
                token_ids = ()
            yield event

    def finish(self, result: Result, stop: str | None) -> Iterator[Delta]:
        """Yield the deltas of the remaining text and the end of the choice. stop: see `ChoiceFinished`."""
        for part in self._parts.finish():
            if not self._complete:
                yield self._event(part)
        cut = result.finish_reason in ("length", "context") and not self._complete
        yield ChoiceFinished(
            self._choice, "length" if cut else "tool_calls" if self._called else "stop", stop
        )

    def _event(self, part: AnswerPart) -> ContentDelta | ReasoningDelta | ToolCallDelta:
        match part:
            case TextPart(text=text):
                return ContentDelta(self._choice, text)
            case ReasoningPart(text=text):
                return ReasoningDelta(self._choice, text)
            case ToolCall():
                self._called += 1
                # Mistral's templates accept only ids of nine letters and digits.
                id = secrets.token_hex(5)[:9]
                return ToolCallDelta(self._choice, self._called - 1, id, part.name, part.arguments)


class TokenFormatter:
    """Formatter of tokens for clients, as text and as bytes, which may be part of a character.

    token_bytes: returns the UTF-8 bytes of a token id.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._bytes = lru_cache(maxsize=4096)(token_bytes)

    def describe(self, token: TokenLogprobs) -> TokenChoice:
        """Return a token with the most likely tokens at its position."""
        top = tuple(self._choice(*pair) for pair in token.top)
        return self._choice(token.token, token.logprob, top)

    def describe_prompt(
        self, ids: Sequence[int], tokens: Sequence[TokenLogprobs | None]
    ) -> tuple[TokenChoice, ...]:
        """Return the tokens of a prompt. The first one has no log-probability."""
        pairs = zip(ids, tokens, strict=True)
        return tuple(self._choice(i, None) if token is None else self.describe(token) for i, token in pairs)

    def _choice(self, token: int, logprob: float | None, top: tuple[TokenChoice, ...] = ()) -> TokenChoice:
        utf8 = self._bytes(token)
        finite = None if logprob is None else max(logprob, _LEAST)
        return TokenChoice(utf8.decode("utf-8", "replace"), utf8, finite, top)
