"""An answer as Anthropic's Messages has it: blocks that are opened, added to and closed, one by one."""

import json
import secrets
from collections.abc import Iterator
from typing import Any

from offspec.server.exchange import Called, Delta, Ended, Said, Thought, Usage

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_UNSIGNED = "unsigned"  # clients keep no thought without a signature; what they send back is not checked

Event = dict[str, Any]


class MessageEvents:
    """Turns the events of an answer into those of a message, which `message` has as far as it has come.

    Args:
        model: Its name.
        prompt_tokens: Of the prompt.
    """

    def __init__(self, model: str, prompt_tokens: int) -> None:
        self.message: Event = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": prompt_tokens, "output_tokens": 0},
        }
        self._open: Event | None = None  # the block that is under way

    def begin(self) -> Event:
        """The first event."""
        return {"type": "message_start", "message": {**self.message, "content": []}}

    def hear(self, item: Delta) -> Iterator[Event]:
        """The events for an event of the answer."""
        match item:
            case Said(text=text) if text:
                yield from self._begin("text", text="")
                yield self._add("text_delta", "text", text)
            case Thought(text=text):
                yield from self._begin("thinking", thinking="", signature="")
                yield self._add("thinking_delta", "thinking", text)
            case Called():
                yield from self._end()
                yield from self._begin("tool_use", id=item.id, name=item.name, input={})
                assert self._open is not None
                self._open["input"] = json.loads(item.arguments)
                yield self._delta("input_json_delta", partial_json=item.arguments)
            case Ended():
                reason = "stop_sequence" if item.stop is not None else _REASONS[item.reason]
                self.message |= {"stop_reason": reason, "stop_sequence": item.stop}
            case Usage():
                self.message["usage"] = _usage(item)

    def end(self) -> Iterator[Event]:
        """The last events."""
        yield from self._end()
        ending = {name: self.message[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": ending, "usage": self.message["usage"]}
        yield {"type": "message_stop"}

    def _begin(self, kind: str, **fields: Any) -> Iterator[Event]:
        """Open a block, unless one of its kind is open."""
        if self._open is not None and self._open["type"] == kind:
            return
        yield from self._end()
        self._open = {"type": kind, **fields}
        self.message["content"].append(self._open)
        yield {"type": "content_block_start", "index": self._index, "content_block": {**self._open}}

    def _end(self) -> Iterator[Event]:
        """Close the block that is open, if one is."""
        if self._open is None:
            return
        if self._open["type"] == "thinking":
            yield self._add("signature_delta", "signature", _UNSIGNED)
        yield {"type": "content_block_stop", "index": self._index}
        self._open = None

    @property
    def _index(self) -> int:
        return len(self.message["content"]) - 1

    def _add(self, kind: str, field: str, text: str) -> Event:
        assert self._open is not None
        self._open[field] += text
        return self._delta(kind, **{field: text})

    def _delta(self, kind: str, **value: str) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, **value}}


def _usage(usage: Usage) -> dict[str, Any]:
    """Counts of tokens; those that a cache held are counted apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.answer_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }
