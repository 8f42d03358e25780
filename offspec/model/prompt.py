"""Validation of prompts: text, chat messages or token ids, checked before a template is applied."""

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

from offspec.core.errors import RequestError
from offspec.core.values import is_unicode

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Messages | Sequence[int]  # ids also as an array or a tensor

_ROLES = ("system", "developer", "user", "assistant", "tool")
_LOOKS = '{"role": "user", "content": "..."}'


def token_ids(prompt: Prompt) -> list[int] | None:
    """Return token ids from a list, array or tensor; None for text and messages.

    Raises RequestError for any other type, and for arrays that are not integer and one-dimensional.
    """
    given: Any = prompt
    if hasattr(given, "tolist"):
        if getattr(given, "ndim", 1) != 1:
            raise RequestError(
                f"token ids must be one-dimensional, not {given.ndim}-dimensional; pass one prompt per call"
            )
        given = given.tolist()
    elif isinstance(given, bytes | bytearray | memoryview):
        raise RequestError("a prompt must be text, not bytes; decode it first, as in prompt.decode()")
    elif not isinstance(given, Sequence):
        kind = type(given).__name__
        raise RequestError(f"a prompt must be a string or a list of messages or of token ids, not {kind}")
    if isinstance(given, str) or not given or isinstance(given[0], str | Mapping):
        return None
    if any(isinstance(item, bool | Mapping) for item in given):
        raise RequestError("token ids must be whole numbers")
    try:
        return [index(item) for item in given]
    except TypeError:
        raise RequestError(f"token ids must be whole numbers, and messages look like {_LOOKS}") from None


def checked_text(text: str) -> str:
    """Return the text unchanged. Raises RequestError if it is not valid Unicode."""
    if not is_unicode(text):
        raise RequestError("the prompt is not valid Unicode text")
    return text


def checked_messages(messages: Messages) -> list[dict[str, Any]]:
    """Return messages in the form a template expects. Raises RequestError if one is invalid."""
    checked = list[dict[str, Any]]()
    for message in messages:
        if not isinstance(message, Mapping):
            raise RequestError(f"a message must look like {_LOOKS}")
        if message.get("tool_calls") and message.get("content") is None:
            message = {**message, "content": ""}
        if message.get("role") not in _ROLES:
            raise RequestError(
                f"a message's role must be one of {', '.join(_ROLES)}, not {message.get('role')!r}"
            )
        _refuse_pictures(message.get("content"))
        if not isinstance(message.get("content"), str):
            raise RequestError(f"the content of the {message['role']} message must be a string")
        checked_text(message["content"])
        checked.append(dict(message))
    if not any(message["content"].strip() for message in checked):
        raise RequestError("the prompt is empty")
    return checked


def _refuse_pictures(content: object) -> None:
    """Raise RequestError with the part's type for a message part that is not text."""
    for part in content if isinstance(content, list) else []:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind != "text":
            raise RequestError(
                f"a message has a part of type {kind[:40]!a}; offspec runs only the language "
                "model of multimodal models and accepts text only, no images, audio or video"
            )
