"""When an answer is over, and why."""

from offspec.core.config import SamplingParams
from offspec.core.events import FinishReason
from offspec.engine.detokenizer import TextStream


class Halted(BaseException):
    """The answer was asked to end; raised where a pass can be cancelled, and caught above it.

    No `Exception`, as `asyncio.CancelledError` is none: what deals with failures below lets it pass.
    """


class Ending:
    """Decides after each token whether the answer is over, and why."""

    def __init__(self, params: SamplingParams, eos: frozenset[int], text: TextStream) -> None:
        self._eos, self._text, self._max = eos, text, params.max_tokens
        self._stops = frozenset(params.stop_token_ids)
        self._count = 0
        self.room = 0  # tokens until the context is full
        self.reason: FinishReason | None = None

    @property
    def left(self) -> int:
        """Tokens that may still come."""
        return min(self._max, self.room) - self._count

    def after(self, token: int) -> bool:
        self._count += 1
        if token in self._eos:
            self.reason = "eos"
        elif token in self._stops or self._text.push(token):
            self.reason = "stop"
        elif self.left <= 0:
            self.reason = "length" if self._count >= self._max else "context"
        return self.reason is not None
