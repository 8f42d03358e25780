"""Answers of OpenAI's Responses: items that are begun, added to and completed, one by one."""

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
    """An answer of Responses: events of its items, or the response.

    Args:
        streamed: See `Reply`.
        response: The response without an answer.
        ask: The request.
        items: Items that the response answers.
        store: Store for requests that continue the response; None if the client disabled storing.
    """

    def __init__(
        self,
        streamed: bool | None,
        response: Object,
        ask: GenerateRequest,
        items: Sequence[Object],
        store: StoredResponses | None,
    ) -> None:
        super().__init__(streamed)
        self._response, self._items, self._store = response, items, store
        self._tools, self._logprobs = ask.tools, ask.params.logprobs is not None
        self._count = 0  # events so far
        self._item: Object | None = None  # the open item
        self._cut = False

    def begin(self) -> Iterator[Event]:
        yield self._event("response.created", response=dict(self._response))
        yield self._event("response.in_progress", response=dict(self._response))

    def feed(self, delta: Delta) -> Iterator[Event]:
        match delta:
            case ContentDelta() if delta.text or (delta.logprobs and self._logprobs):
                yield from self._said(delta)
            case ReasoningDelta(text=text):
                yield from self._open("reasoning", summary=[], content=[])
                yield self._add("response.reasoning_text.delta", text, content_index=0)
            case ToolCallDelta():
                yield from self._called(delta)
            case ChoiceFinished():
                self._cut = delta.reason == "length"
                yield from self._close("incomplete" if self._cut else "completed")
            case Usage():
                self._response["usage"] = usage_body(delta, cache_write_tokens=0)

    async def end(self) -> Iterable[Event]:
        """Return the last event, once the response is stored. Events of a client that waits precede it."""
        status: Object = {"completed_at": int(time.time()), "status": "completed"}
        if self._cut:
            status |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        response = self._response | status
        if self._store is not None:
            try:
                stored = StoredResponse(response, [*self._items, *response["output"]])
                await asyncio.to_thread(self._store.keep, stored)
            except (OSError, OffspecError) as error:
                log.warning("a response could not be kept for previous_response_id: %s", error)
                response["store"] = False
        self._response = response
        return (self._event(f"response.{response['status']}", response=response),)

    def whole(self) -> Object:
        return self._response

    def fault(self, fault: ApiError) -> Event:
        code = "rate_limit_exceeded" if fault.kind == "rate_limit" else "server_error"
        error = {"code": code, "message": fault.message}
        self._response |= {"status": "failed", "error": error}
        failed = self._event("response.failed", response=self._response)
        return failed if self.streamed else self._response

    def encode(self, event: Event) -> bytes:
        return sse_event(event, event["type"])

    def keep_alive(self) -> bytes:
        """Return an event: Codex ends a stream without events, comments aside."""
        return self.encode(self._event("response.in_progress", response=dict(self._response)))

    def _said(self, item: ContentDelta) -> Iterator[Event]:
        yield from self._open("message", role="assistant", content=[])
        logprobs = [logprob_body(token) for token in item.logprobs] if self._logprobs else []
        if self._logprobs:
            self._part["logprobs"] += logprobs
        yield self._add("response.output_text.delta", item.text, content_index=0, logprobs=logprobs)

    def _called(self, item: ToolCallDelta) -> Iterator[Event]:
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
    def _part(self) -> Object:
        assert self._item is not None
        part: Object = self._item["content"][0]
        return part

    def _add(self, kind: str, text: str, **more: Any) -> Object:
        self._part["text"] += text
        return self._placed(kind, delta=text, **more)

    def _open(self, kind: str, **fields: Any) -> Iterator[Event]:
        """Begin an item, unless one of its kind is under way."""
        if self._item is not None and self._item["type"] == kind:
            return
        yield from self._close()
        id = f"{_PREFIXES[kind]}_{secrets.token_hex(16)}"
        self._item = {"id": id, "type": kind, "status": "in_progress", **fields}
        yield self._event("response.output_item.added", output_index=self._place, item=_copied(self._item))
        if kind in _PARTS:
            part: Object = {"type": _PARTS[kind], "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
            self._item["content"].append(part)
            yield self._placed("response.content_part.added", content_index=0, part=_copied(part))

    def _close(self, status: str = "completed") -> Iterator[Event]:
        """Complete the open item, if any."""
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
        yield self._event("response.output_item.done", output_index=self._place, item=item)
        self._response["output"].append(item)
        self._item = None

    @property
    def _place(self) -> int:
        return len(self._response["output"])

    def _placed(self, kind: str, **fields: Any) -> Object:
        assert self._item is not None
        return self._event(kind, item_id=self._item["id"], output_index=self._place, **fields)

    def _event(self, kind: str, **fields: Any) -> Object:
        self._count += 1
        return {"type": kind, "sequence_number": self._count - 1, **fields}


def _copied(value: Object) -> Object:
    """Return a snapshot: lists in the object grow later."""
    return {name: list(item) if isinstance(item, list) else item for name, item in value.items()}
