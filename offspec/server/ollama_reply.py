"""The objects that an answer consists of in Ollama's API."""

from collections.abc import AsyncGenerator, Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from offspec.server.answer_times import AnswerTimes
from offspec.server.delta_stream import DeltaStream
from offspec.server.exchange import Called, Delta, Ended, LikelyToken, Said, Thought, TokenChoice, Usage
from offspec.server.faults import Fault
from offspec.server.responses import json_line

Shape = Callable[[str, str, Sequence[dict[str, Any]]], dict[str, Any]]  # text, reasoning, and calls


def error_body(fault: Fault) -> dict[str, Any]:
    """A fault in Ollama's shape."""
    return {"error": fault.message}


def written_time(seconds: float | None = None) -> str:
    """A time as Ollama writes it, by default now."""
    at = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return at.isoformat().replace("+00:00", "Z")


def chat_shape(text: str, thought: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A part of an answer of /api/chat."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thought:
        message["thinking"] = thought
    if calls:
        message["tool_calls"] = calls
    return {"message": message}


def generate_shape(text: str, thought: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A part of an answer of /api/generate."""
    return {"response": text, "thinking": thought} if thought else {"response": text}


class Reply:
    """The objects that one answer consists of."""

    def __init__(self, model: str, shape: Shape) -> None:
        self._model, self._shape = model, shape
        self._times = AnswerTimes()
        self._reason, self._usage = "stop", Usage(0, 0, 0, 0, 0)

    def part(
        self,
        text: str = "",
        thought: str = "",
        calls: Sequence[dict[str, Any]] = (),
        logprobs: Sequence[dict[str, Any]] = (),
    ) -> dict[str, Any]:
        """A part of the answer."""
        more = {"logprobs": logprobs} if logprobs else {}
        head = {"model": self._model, "created_at": written_time()}
        return {**head, **self._shape(text, thought, calls), "done": False, **more}

    async def lines(self, answer: DeltaStream) -> AsyncGenerator[bytes, None]:
        """A streamed answer."""
        async for item in answer:
            if given := self._hear(item):
                yield json_line(self.part(**given))
        yield json_line({**self.part(), **self._end()})

    async def whole(self, answer: DeltaStream) -> dict[str, Any]:
        """A whole answer."""
        gathered: dict[str, Any] = {"text": "", "thought": "", "calls": [], "logprobs": []}
        async for item in answer:
            for name, value in self._hear(item).items():
                gathered[name] += value
        return {**self.part(**gathered), **self._end()}

    def _hear(self, item: Delta) -> dict[str, Any]:
        """Arguments of `part` for an event."""
        match item:
            case Said() if item.text or item.logprobs:
                self._times.note()
                return {"text": item.text, "logprobs": [_logprob(token) for token in item.logprobs]}
            case Thought():
                self._times.note()
                return {"thought": item.text}
            case Called():
                self._times.note()
                made = {"name": item.name, "arguments": msgspec.json.decode(item.arguments)}
                return {"calls": [{"id": item.id, "function": {"index": item.index, **made}}]}
            case Ended():
                self._reason = "length" if item.reason == "length" else "stop"
            case Usage():
                self._usage = item
        return {}

    def _end(self) -> dict[str, Any]:
        """Further fields of the last object. Durations are in nanoseconds."""
        times = self._times
        return {
            "done": True,
            "done_reason": self._reason,
            "total_duration": times.total,
            "load_duration": 0,
            "prompt_eval_count": self._usage.prompt_tokens,
            "prompt_eval_duration": times.prompt,
            "eval_count": self._usage.answer_tokens,
            "eval_duration": times.answer,
        }


def _logprob(token: TokenChoice) -> dict[str, Any]:
    return {**_likely(token.chosen), "top_logprobs": [_likely(each) for each in token.top]}


def _likely(token: LikelyToken) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.utf8)}
