"""Fields of a request to Chat Completions or Completions, and an answer as chunks of its choices."""

import secrets
import time
from abc import abstractmethod
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from offspec.server.exchange import Usage
from offspec.server.faults import openai_error
from offspec.server.openai_common import ChoosingTokens, StreamOptions
from offspec.server.reply import Event, Reply

_DONE = msgspec.Raw(b"[DONE]")  # the last event of a stream


class ChunkedBody(ChoosingTokens, kw_only=True):
    """Fields of both APIs."""

    model: str = ""
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def choices(self) -> int:
        """Number of choices of each prompt."""
        return self.n or 1


class ChunkedReply(Reply):
    """An answer of one of the APIs: chunks of its choices, or all choices. body: the request."""

    kind: ClassVar[str]  # of the object
    chunk_kind: ClassVar[str]  # of an object in a stream
    id_prefix: ClassVar[str]
    error_body = staticmethod(openai_error)

    def __init__(self, body: ChunkedBody) -> None:
        super().__init__(body.stream)
        self._model = body.model
        self._head = self._header(self.chunk_kind)
        self._with_usage = body.stream_options is not None and body.stream_options.include_usage
        self.usage = Usage()

    @abstractmethod
    def choice_bodies(self) -> Iterable[dict[str, Any]]:
        """Return all choices, whole."""

    def chunk(self, *choices: dict[str, Any], **more: Any) -> Event:
        """Return a chunk with parts of choices."""
        usage = {"usage": None} if self._with_usage else {}
        return {**self._head, "choices": choices, **usage, **more}

    async def end(self) -> Iterable[Event]:
        return (self.chunk(usage=_usage_body(self.usage)), _DONE) if self._with_usage else (_DONE,)

    def whole(self) -> dict[str, Any]:
        choices, usage = [*self.choice_bodies()], _usage_body(self.usage)
        return {**self._header(self.kind), "choices": choices, "usage": usage}

    def _header(self, kind: str) -> dict[str, Any]:
        id = f"{self.id_prefix}-{secrets.token_hex(16)}"
        return {"id": id, "object": kind, "created": int(time.time()), "model": self._model}


def _usage_body(usage: Usage) -> dict[str, Any]:
    """Counts of tokens."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.answer_tokens,
        "total_tokens": usage.prompt_tokens + usage.answer_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }
