"""Answers of OpenAI's Responses API, as output items that are streamed one after another."""

import asyncio
import logging
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from offspec.core.errors import OffspecError
from offspec.server.api_errors import ApiError
from offspec.server.openai_common import logprob_body, usage_body
from offspec.server.protocol import (
    ChoiceFinished,
    ContentDelta,
    Delta,
    GenerateRequest,
    ReasoningDelta,
    ToolCallDelta,
    Usage,
)
from offspec.server.reply import Event, Reply, sse_event
from offspec.server.stored_responses import StoredResponse, StoredResponses
from offspec.server.tools import custom_input

log = logging.getLogger("offspec.server")

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
_INPUTS = {"function_call": "function_call_arguments", "custom_tool_call": "custom_tool_call_input"}
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}

Object = dict[str, Any]


class ResponseReply(Reply):
    """Converter of an answer to the Responses API: events of its items, or the response.

    Args:
        streamed: See `Reply`.
        response: Response object without output.
        request: The request.
        items: Items of the conversation before the answer.
        store: Store for the response, so that requests can continue it. None: the client disabled storing.
    """

    def __init__(
        self,
        streamed: bool | None,
        response: Object,
        request: GenerateRequest,
        items: Sequence[Object],
        store: StoredResponses | None,
    ) -> None:
        super().__init__(streamed)
        self._response, self._items, self._store = response, items, store
        self._tools, self._logprobs = request.tools, request.params.logprobs is not None
        self._count = 0  # events so far
        self._item: Object | None = None  # the open item
        self._truncated = False

    def begin(self) -> Iterator[Event]:
        yield self._event("response.created", response=dict(self._response))
        yield self._event("response.in_progress", response=dict(self._response))

    def feed(self, delta: Delta) -> Iterator[Event]:
        match delta:
            case ContentDelta() if delta.text or (delta.logprobs and self._logprobs):
                yield from self._add_text(delta)
            case ReasoningDelta(text=text):
                yield from self._open("reasoning", summary=[], content=[])
                yield self._add("response.reasoning_text.delta", text, content_index=0)
            case ToolCallDelta():
                yield from self._add_call(delta)
            case ChoiceFinished():
                self._truncated = delta.reason == "length"
                yield from self._close("incomplete" if self._truncated else "completed")
            case Usage():
                self._response["usage"] = usage_body(delta, cache_write_tokens=0)

    async def end(self) -> Iterable[Event]:
        """Store the response and return the last event."""
        status: Object = {"completed_at": int(time.time()), "status": "completed"}
        if self._truncated:
            status |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        response = self._response | status
        if self._store is not None:
            try:
                stored = StoredResponse(response, [*self._items, *response["output"]])
                await asyncio.to_thread(self._store.keep, stored)
            except (OSError, OffspecError) as error:
                log.warning("cannot store a response for previous_response_id: %s", error)
                response["store"] = False
        self._response = response
        return (self._event(f"response.{response['status']}", response=response),)

    def whole(self) -> Object:
        return self._response

    def error(self, error: ApiError) -> Event:
        code = "rate_limit_exceeded" if error.kind == "rate_limit" else "server_error"
        self._response |= {"status": "failed", "error": {"code": code, "message": error.message}}
        failed = self._event("response.failed", response=self._response)
        return failed if self.streamed else self._response

    def encode(self, event: Event) -> bytes:
        return sse_event(event, event["type"])

    def keep_alive(self) -> bytes:
        """Return an event instead of a comment, because Codex ends a stream that sends only comments."""
        return self.encode(self._event("response.in_progress", response=dict(self._response)))

    def _add_text(self, item: ContentDelta) -> Iterator[Event]:
        yield from self._open("message", role="assistant", content=[])
        logprobs = [logprob_body(token) for token in item.logprobs] if self._logprobs else []
        if self._logprobs:
            self._part["logprobs"] += logprobs
        yield self._add("response.output_text.delta", item.text, content_index=0, logprobs=logprobs)

    def _add_call(self, item: ToolCallDelta) -> Iterator[Event]:
        yield from self._close()
        custom = item.name in self._tools.custom
        field, text = ("input", custom_input(item.arguments)) if custom else ("arguments", item.arguments)
        kind = "custom_tool_call" if custom else "function_call"
        named = {"name": item.name}
        if item.name in self._tools.namespaces:
            named = dict(zip(("namespace", "name"), self._tools.namespaces[item.name], strict=True))
        yield from self._open(kind, call_id=item.id, **named, **{field: ""})
        assert self._item is not None
        self._item[field] = text
        yield self._item_event(f"response.{_INPUTS[kind]}.delta", delta=text)

    @property
    def _part(self) -> Object:
        assert self._item is not None
        part: Object = self._item["content"][0]
        return part

    def _add(self, kind: str, text: str, **more: Any) -> Object:
        self._part["text"] += text
        return self._item_event(kind, delta=text, **more)

    def _open(self, kind: str, **fields: Any) -> Iterator[Event]:
        """Begin an item unless an item of the same type is open."""
        if self._item is not None and self._item["type"] == kind:
            return
        yield from self._close()
        id = f"{_PREFIXES[kind]}_{secrets.token_hex(16)}"
        self._item = {"id": id, "type": kind, "status": "in_progress", **fields}
        yield self._event("response.output_item.added", output_index=self._index, item=_snapshot(self._item))
        if kind in _PARTS:
            part: Object = {"type": _PARTS[kind], "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
            self._item["content"].append(part)
            yield self._item_event("response.content_part.added", content_index=0, part=_snapshot(part))

    def _close(self, status: str = "completed") -> Iterator[Event]:
        """Complete the open item, if any."""
        if (item := self._item) is None:
            return
        match item["type"]:
            case "message":
                part = self._part
                fields = {"text": part["text"], "logprobs": part["logprobs"]}
                yield self._item_event("response.output_text.done", content_index=0, **fields)
            case "reasoning":
                yield self._item_event(
                    "response.reasoning_text.done", content_index=0, text=self._part["text"]
                )
            case kind:
                field = "input" if kind == "custom_tool_call" else "arguments"
                yield self._item_event(
                    f"response.{_INPUTS[kind]}.done", name=item["name"], **{field: item[field]}
                )
        if item["type"] in _PARTS:
            yield self._item_event("response.content_part.done", content_index=0, part=self._part)
        item["status"] = status
        yield self._event("response.output_item.done", output_index=self._index, item=item)
        self._response["output"].append(item)
        self._item = None

    @property
    def _index(self) -> int:
        return len(self._response["output"])

    def _item_event(self, kind: str, **fields: Any) -> Object:
        assert self._item is not None
        return self._event(kind, item_id=self._item["id"], output_index=self._index, **fields)

    def _event(self, kind: str, **fields: Any) -> Object:
        self._count += 1
        return {"type": kind, "sequence_number": self._count - 1, **fields}


def _snapshot(value: Object) -> Object:
    """Return a copy whose lists do not change when the object's lists grow later."""
    return {name: list(item) if isinstance(item, list) else item for name, item in value.items()}
