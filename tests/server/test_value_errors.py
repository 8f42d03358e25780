"""Errors for invalid bodies: the field and the expected value, in our own words."""

from typing import Any

import pytest

from offspec.server import anthropic, openai_chat, openai_completions, openai_responses
from offspec.server.api_errors import ApiError
from offspec.server.parsing import convert, parse

ASKED = {"model": "m", "messages": [{"role": "user", "content": "Why?"}]}
CHAT, TEXT = openai_chat.Body, openai_completions.Body


@pytest.mark.parametrize(
    ("body", "given", "field", "message"),
    [
        (CHAT, {"temperature": "hot"}, "temperature", "must be a number, not a string"),
        (CHAT, {"max_tokens": 1.5}, "max_tokens", "must be a whole number, not a fraction"),
        (CHAT, {"messages": "Why?"}, "messages", "must be a list, not a string"),
        (CHAT, {"messages": [{"role": 3}]}, "messages[0].role", "must be a string, not a whole number"),
        (CHAT, {"stream": "yes"}, "stream", "must be true or false, not a string"),
        (CHAT, {"stop": 5}, "stop", "must be a string or a list, not a whole number"),
        (CHAT, {"top_logprobs": 99}, "top_logprobs", "must be at most 20"),
        (CHAT, {"response_format": {"type": "poem"}}, "response_format.type", "has the unknown value 'poem'"),
        (CHAT, {"tool_choice": 4}, "tool_choice", "must be a string or an object, not a whole number"),
        (TEXT, {"prompt": {"a": 1}}, "prompt", "must be a string or a list, not an object"),
        (TEXT, {"n": "two", "prompt": "x"}, "n", "must be a whole number, not a string"),
        (openai_responses.Body, {"input": 7}, "input", "must be a string or a list, not a whole number"),
        (anthropic.Body, {"max_tokens": "many"}, "max_tokens", "must be a whole number, not a string"),
        (anthropic.Body, {"max_tokens": 5, "thinking": "on"}, "thinking", "must be an object, not a string"),
    ],
)
def test_wrong_type(body: Any, given: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        convert({**ASKED, **given}, body, ignored=[])
    assert (caught.value.message, caught.value.field) == (f"{field} {message}", field)


@pytest.mark.parametrize(
    ("body", "given", "field"),
    [
        (CHAT, {"messages": []}, "messages"),
        (TEXT, {"prompt": []}, "prompt"),
        (openai_responses.Body, {"input": []}, "input"),
        (anthropic.Body, {"max_tokens": 5, "messages": []}, "messages"),
    ],
)
def test_a_required_list_that_is_empty(body: Any, given: dict[str, Any], field: str) -> None:
    with pytest.raises(ApiError) as caught:
        convert({**ASKED, **given}, body, ignored=[])
    assert (caught.value.message, caught.value.field) == (f"{field} must not be empty", field)


def test_missing_field_and_wrong_body() -> None:
    with pytest.raises(ApiError, match=r"^messages is missing$"):
        convert({"model": "m"}, CHAT, ignored=[])
    with pytest.raises(ApiError, match=r"^the body must be an object, not a list$"):
        convert([1], CHAT, ignored=[])


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{", ": it ends too early"),
        (b'{"a":}', " at byte 5"),
        (b'{"a": "\xff"}', ": it is not UTF-8 at byte 0"),
        (b"[" * 100_000, ": it is nested too deeply"),
    ],
)
def test_body_is_not_json(body: bytes, reason: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(body)
    assert caught.value.message == f"the body is not valid JSON{reason}"
