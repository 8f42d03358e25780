"""Chat messages in forms that more chat templates accept.

Coding agents send several system messages, some of them after the user's first, and several user messages in
a row. Many templates refuse such messages, and others leave some of them out of the prompt.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

Message = dict[str, Any]
_SYSTEM = ("system", "developer")
_REASONING = ("reasoning_content", "reasoning", "thinking")


def forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield the messages as they are, and then forms of them with fewer roles in a stricter order.

    No form loses text, except reasoning before a call of a tool.
    """
    form = list(messages)
    yield form
    for change in _CHANGES:
        changed = change(form)
        if changed != form:
            form = changed
            yield form


def _one_system(messages: Sequence[Message]) -> list[Message]:
    """Join system messages at the beginning, make later ones the user's, and join successive turns."""
    start = next((at for at, each in enumerate(messages) if each["role"] not in _SYSTEM), len(messages))
    changed = list[Message]()
    for at, message in enumerate(messages):
        if message["role"] in _SYSTEM:
            message = message | {"role": "system" if at < start else "user"}
        if changed and _one_turn(changed[-1], message):
            changed[-1] = _with_texts(changed[-1] | message, changed[-1], message)
        else:
            changed.append(message)
    return changed


def _one_turn(message: Message, following: Message) -> bool:
    """Return whether two messages can be one. Calls of tools and their results stay as they are."""
    return message["role"] == following["role"] != "tool" and "tool_calls" not in message


def _text_or_reasoning(messages: Sequence[Message]) -> list[Message]:
    """Leave reasoning out of messages that have text and calls of tools."""
    return [
        {name: value for name, value in each.items() if name not in _REASONING}
        if each.get("tool_calls") and each["content"].strip()
        else each
        for each in messages
    ]


def _user_in_result(messages: Sequence[Message]) -> list[Message]:
    """Append a user message that follows the result of a tool to that result."""
    changed = list[Message]()
    for message in messages:
        if message["role"] == "user" and changed and changed[-1]["role"] == "tool":
            changed[-1] = _with_texts(changed[-1], changed[-1], message)
        else:
            changed.append(message)
    return changed


def _system_in_user(messages: Sequence[Message]) -> list[Message]:
    """Put the system message at the beginning of the first user message."""
    if [message["role"] for message in messages[:2]] != ["system", "user"]:
        return list(messages)
    return [_with_texts(messages[1], *messages[:2]), *messages[2:]]


def _with_texts(message: Message, *sources: Message) -> Message:
    texts = [source["content"] for source in sources if source["content"].strip()]
    return message | {"content": "\n\n".join(texts)}


_CHANGES: tuple[Callable[[Sequence[Message]], list[Message]], ...] = (
    _one_system,
    _text_or_reasoning,
    _user_in_result,
    _system_in_user,
)
