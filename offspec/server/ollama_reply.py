"""The objects that an answer consists of in Ollama's API."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from offspec.server.exchange import Called, Delta, Ended, Said, Thought, Usage
from offspec.server.faults import ollama_error
from offspec.server.openai_common import logprob_body
from offspec.server.reply import AnswerTimes, Event, Reply, json_line

Shape = Callable[[str, str, Sequence[dict[str, Any]]], dict[str, Any]]  # text, reasoning, and calls


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


class OllamaReply(Reply):
    """An answer in Ollama's API: parts as lines of JSON, or one part.

    Args:
        streamed: See `Reply`.
        model: Name of the model.
        shape: Makes a part from text, reasoning and calls.
    """

    media_type = "application/x-ndjson"
    error_body = staticmethod(ollama_error)

    def __init__(self, streamed: bool, model: str, shape: Shape) -> None:
        super().__init__(streamed)
        self._model, self._shape = model, shape
        self._times = AnswerTimes()
        self._reason, self._usage = "stop", Usage()
        self._gathered: dict[str, Any] = {"text": "", "thought": "", "calls": [], "logprobs": []}

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

    def feed(self, delta: Delta) -> Iterator[Event]:
        if not (given := self._given(delta)):
            return
        self._times.note()
        if not self.streamed:
            for name, value in given.items():
                self._gathered[name] += value
        yield self.part(**given)

    async def end(self) -> Iterable[Event]:
        return ({**self.part(), **self._end()},)

    def whole(self) -> dict[str, Any]:
        return {**self.part(**self._gathered), **self._end()}

    def encode(self, event: Event) -> bytes:
        return json_line(event)

    def keep_alive(self) -> bytes:
        return json_line(self.part())

    def _given(self, delta: Delta) -> dict[str, Any]:
        """Arguments of `part` for a delta."""
        match delta:
            case Said() if delta.text or delta.logprobs:
                return {"text": delta.text, "logprobs": [logprob_body(token) for token in delta.logprobs]}
            case Thought():
                return {"thought": delta.text}
            case Called():
                made = {"name": delta.name, "arguments": msgspec.json.decode(delta.arguments)}
                return {"calls": [{"id": delta.id, "function": {"index": delta.index, **made}}]}
            case Ended():
                self._reason = "length" if delta.reason == "length" else "stop"
            case Usage():
                self._usage = delta
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
