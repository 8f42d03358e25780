"""Tokens as clients are to see them: their text, and the bytes behind it where that is half a character."""

from collections.abc import Callable, Sequence
from functools import lru_cache

from offspec.core.events import TokenLogprobs
from offspec.server.exchange import LikelyToken, TokenChoice

_LEAST = -9999.0  # JSON knows no infinity


class TokenTexts:
    """token_bytes: what a token stands for, in UTF-8."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._bytes = lru_cache(maxsize=4096)(token_bytes)

    def describe(self, token: TokenLogprobs) -> TokenChoice:
        """A token and the likeliest ones beside it."""
        top = tuple(self._likely(*pair) for pair in token.top)
        return TokenChoice(self._likely(token.token, token.logprob), top)

    def describe_prompt(
        self, ids: Sequence[int], tokens: Sequence[TokenLogprobs | None]
    ) -> tuple[TokenChoice, ...]:
        """The tokens of a prompt, of which the first has no log-probability."""
        pairs = zip(ids, tokens, strict=True)
        return tuple(
            TokenChoice(self._likely(i, None)) if token is None else self.describe(token)
            for i, token in pairs
        )

    def _likely(self, token: int, logprob: float | None) -> LikelyToken:
        utf8 = self._bytes(token)
        known = None if logprob is None else max(logprob, _LEAST)
        return LikelyToken(utf8.decode("utf-8", "replace"), utf8, known)
