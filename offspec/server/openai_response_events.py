"""An answer as OpenAI's Responses tells it: items that are begun, added to and completed, one by one."""

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from offspec.server.exchange import Called, Delta, Ended, LikelyToken, Said, Thought, TokenChoice, Usage
from offspec.server.faults import Fault
from offspec.server.tools import Tools, custom_input

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
_INPUTS = {"function_call": "function_call_arguments", "custom_tool_call": "custom_tool_call_input"}
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}

Told = dict[str, Any]


class ResponseEvents:
    """Turns the events of an answer into those of a response, which `response` has as far as it has come.

    Args:
        response: What is known of it before there is an answer.
        logprobs: Whether those of tokens are told.
        tools: Tools of the request: calls of custom tools have text instead of arguments.
    """

    def __init__(self, response: Told, logprobs: bool, tools: Tools) -> None:
        self.response = response
        self._logprobs, self._tools = logprobs, tools
        self._count = 0  # events told
        self._item: Told | None = None  # the one that is under way
        self._cut = False

    def begin(self) -> Iterator[Told]:
        """The first events."""
        yield self._told("response.created", response=dict(self.response))
        yield self._told("response.in_progress", response=dict(self.response))

    def wait(self) -> Told:
        """An event to send while there is none: Codex ends a stream without events, comments aside."""
        return self._told("response.in_progress", response=dict(self.response))

    def hear(self, item: Delta) -> Iterator[Told]:
        """What an event of the answer comes to."""
        match item:
            case Said() if item.text or (item.logprobs and self._logprobs):
                yield from self._said(item)
            case Thought(text=text):
                yield from self._open("reasoning", summary=[], content=[])
                yield self._add("response.reasoning_text.delta", text, content_index=0)
            case Called():
                yield from self._called(item)
            case Ended():
                self._cut = item.reason == "length"
                yield from self._close("incomplete" if self._cut else "completed")
            case Usage():
                self.response["usage"] = _usage(item)

    def ended(self) -> Told:
        """The whole response."""
        cut = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        return (
            self.response
            | {"completed_at": int(time.time())}
            | (cut if self._cut else {"status": "completed"})
        )

    def complete(self, response: Told) -> Told:
        """The last event."""
        return self._told(f"response.{response['status']}", response=response)

    def fail(self, fault: Fault) -> Told:
        """The last event of an answer that came to no good end."""
        code = "rate_limit_exceeded" if fault.kind == "rate_limit" else "server_error"
        error = {"code": code, "message": fault.message}
        self.response |= {"status": "failed", "error": error}
        return self._told("response.failed", response=self.response)

    def _said(self, item: Said) -> Iterator[Told]:
        yield from self._open("message", role="assistant", content=[])
        logprobs = _tokens(item.logprobs) if self._logprobs else []
        if self._logprobs:
            self._part["logprobs"] += logprobs
        yield self._add("response.output_text.delta", item.text, content_index=0, logprobs=logprobs)

    def _called(self, item: Called) -> Iterator[Told]:
        yield from self._close()
        custom = item.name in self._tools.custom
        field, given = ("input", custom_input(item.arguments)) if custom else ("arguments", item.arguments)
        kind = "custom_tool_call" if custom else "function_call"
        named = {"name": item.name}
        if item.name in self._tools.namespaces:
            named = dict(zip(("namespace", "name"), self._tools.namespaces[item.name], strict=True))
        yield from self._open(kind, call_id=item.id, **named, **{field: ""})
        assert self._item is not None
        self._item[field] = given
        yield self._placed(f"response.{_INPUTS[kind]}.delta", delta=given)

    @property
    def _part(self) -> Told:
        assert self._item is not None
        part: Told = self._item["content"][0]
        return part

    def _add(self, kind: str, text: str, **more: Any) -> Told:
        self._part["text"] += text
        return self._placed(kind, delta=text, **more)

    def _open(self, kind: str, **fields: Any) -> Iterator[Told]:
        """Begin an item, unless one of its kind is under way."""
        if self._item is not None and self._item["type"] == kind:
            return
        yield from self._close()
        id = f"{_PREFIXES[kind]}_{secrets.token_hex(16)}"
        self._item = {"id": id, "type": kind, "status": "in_progress", **fields}
        yield self._told("response.output_item.added", output_index=self._place, item=_copied(self._item))
        if kind in _PARTS:
            part: Told = {"type": _PARTS[kind], "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
            self._item["content"].append(part)
            yield self._placed("response.content_part.added", content_index=0, part=_copied(part))

    def _close(self, status: str = "completed") -> Iterator[Told]:
        """Complete the item that is under way, if one is."""
        if (item := self._item) is None:
            return
        match item["type"]:
            case "message":
                part = self._part
                given = {"text": part["text"], "logprobs": part["logprobs"]}
                yield self._placed("response.output_text.done", content_index=0, **given)
            case "reasoning":
                yield self._placed("response.reasoning_text.done", content_index=0, text=self._part["text"])
            case kind:
                field = "input" if kind == "custom_tool_call" else "arguments"
                yield self._placed(
                    f"response.{_INPUTS[kind]}.done", name=item["name"], **{field: item[field]}
                )
        if item["type"] in _PARTS:
            yield self._placed("response.content_part.done", content_index=0, part=self._part)
        item["status"] = status
        yield self._told("response.output_item.done", output_index=self._place, item=item)
        self.response["output"].append(item)
        self._item = None

    @property
    def _place(self) -> int:
        return len(self.response["output"])

    def _placed(self, kind: str, **fields: Any) -> Told:
        assert self._item is not None
        return self._told(kind, item_id=self._item["id"], output_index=self._place, **fields)

    def _told(self, kind: str, **fields: Any) -> Told:
        self._count += 1
        return {"type": kind, "sequence_number": self._count - 1, **fields}


def _copied(value: Told) -> Told:
    """As it is now: lists in it grow later."""
    return {name: list(item) if isinstance(item, list) else item for name, item in value.items()}


def _tokens(tokens: Sequence[TokenChoice]) -> list[Told]:
    return [{**_token(each.chosen), "top_logprobs": [_token(one) for one in each.top]} for each in tokens]


def _token(token: LikelyToken) -> Told:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.utf8)}


def _usage(usage: Usage) -> Told:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.answer_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.answer_tokens,
    }
