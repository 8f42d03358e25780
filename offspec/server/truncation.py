"""`truncation: auto`: the oldest turns of a conversation are left out until prompt and answer fit."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from offspec.server.exchange import Ask
from offspec.server.service import Service

_ANSWER = 4  # an answer that may be long has at least this part of the context


async def truncated(service: Service, ask: Ask) -> Ask:
    """Return the request with as many of its latest turns as leave room for the answer. Raises Fault.

    A turn begins with a message of the user. Messages of the system before the first turn stay.
    """
    context = service.engine.context
    most = context - min(ask.params.max_tokens, context // _ANSWER)
    messages: Sequence[Mapping[str, Any]] = ask.prompt  # type: ignore[assignment]
    turns = [at for at, message in enumerate(messages) if message["role"] == "user"]
    head = [message for message in messages[: turns[0] if turns else 0] if message["role"] != "assistant"]

    def tail(first: int) -> Ask:
        return ask if first == 0 else replace(ask, prompt=[*head, *messages[turns[first] :]])

    low, high = 0, max(len(turns) - 1, 0)  # the number of turns to leave out: the least that is enough
    while low < high:
        middle = (low + high) // 2
        if await service.count(tail(middle)) <= most:
            high = middle
        else:
            low = middle + 1
    return tail(low)
