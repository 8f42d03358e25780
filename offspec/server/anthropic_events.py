"""An answer as Anthropic's Messages tells it: blocks that are opened, added to and closed, one by one."""

from collections.abc import Iterator
from typing import Any

from offspec.server.exchange import Called, Delta, Said, Thought, Usage

_UNSIGNED = "unsigned"  # clients keep no thought without a signature; what they send back is not checked


class Blocks:
    """Events of an answer as blocks: each is opened, added to, and closed before the next."""

    def __init__(self) -> None:
        self.index, self._kind = -1, ""

    def events(self, item: Delta) -> Iterator[dict[str, Any]]:
        """What an event of the answer comes to."""
        match item:
            case Said(text=text) if text:
                yield from self._open("text", {"text": ""})
                yield self._delta("text_delta", text=text)
            case Thought(text=text):
                yield from self._open("thinking", {"thinking": "", "signature": ""})
                yield self._delta("thinking_delta", thinking=text)
            case Called():
                if item.name:
                    yield from self.close()
                    yield from self._open("tool_use", {"id": item.id, "name": item.name, "input": {}})
                yield self._delta("input_json_delta", partial_json=item.arguments)

    def close(self) -> Iterator[dict[str, Any]]:
        """The end of the block that is open, if one is."""
        if self._kind == "thinking":
            yield self._delta("signature_delta", signature=_UNSIGNED)
        if self._kind:
            yield {"type": "content_block_stop", "index": self.index}
        self._kind = ""

    def _open(self, kind: str, empty: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if kind != self._kind:
            yield from self.close()
            self.index, self._kind = self.index + 1, kind
            block = {"type": kind, **empty}
            yield {"type": "content_block_start", "index": self.index, "content_block": block}

    def _delta(self, kind: str, **value: str) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self.index, "delta": {"type": kind, **value}}


def usage_body(usage: Usage) -> dict[str, Any]:
    """Counts of tokens; those that a cache held are counted apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.answer_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }
