"""A prompt as callers write it: text, chat messages or token ids, checked before a template sees it."""

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
    """Ids, from a list of them, an array or a tensor; None for text and messages.

    Raises RequestError for what is none of these, and for arrays of more than one dimension or of fractions.
    """
    given: Any = prompt
    if hasattr(given, "tolist"):
        if getattr(given, "ndim", 1) != 1:
            raise RequestError(
                f"token ids must be in one dimension, not in {given.ndim}: one prompt at a time is answered"
            )
        given = given.tolist()
    elif isinstance(given, bytes | bytearray | memoryview):
        raise RequestError("a prompt must be text and not bytes: decode it first, as in prompt.decode()")
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
    """Text as it was given. Raises RequestError where it is not valid Unicode."""
    if not is_unicode(text):
        raise RequestError("the prompt is not valid Unicode text")
    return text


def checked_messages(messages: Messages) -> list[dict[str, Any]]:
    """Messages as a template expects them. Raises RequestError."""
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
    """Raise RequestError, by its kind, for a part of a message that is no text."""
    for part in content if isinstance(content, list) else []:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind != "text":
            raise RequestError(
                f"a message has a part of type {kind[:40]!a}: offspec runs the language "
                "model of such models alone, on text; pictures, sound and video are not read"
            )
