"""Tools for models whose chat template has none: a message of the system describes them.

Calls are written as Hermes models write them: JSON between `<tool_call>` tags. Earlier calls are text in the
same tags, and their results are text of the user.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

CALL_MARK = "<tool_call>"
_RESULT = "<tool_response>\n"
_PROMPT = """You can call functions. Their signatures, one JSON object per line:
<tools>
{tools}
</tools>
To call one, write a JSON object with its name and arguments between tags:
<tool_call>
{{"name": "function_name", "arguments": {{"argument": "value"}}}}
</tool_call>
The result of a call then comes between <tool_response> tags. Answer without a call if none helps."""


def with_tool_prompt(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return messages for a template that knows neither tools nor their results."""
    written = [_plain(message) for message in messages]
    if tools:
        signatures = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        prompt = _PROMPT.format(tools=signatures)
        if written and written[0]["role"] == "system":
            written[0] = {**written[0], "content": f"{written[0]['content']}\n\n{prompt}"}
        else:
            written.insert(0, {"role": "system", "content": prompt})
    return _joined(written)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without calls and results, which are text in it."""
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"{_RESULT}{content}\n</tool_response>"}
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    calls = [_call(call["function"]) for call in message.get("tool_calls") or ()]
    return {**rest, "content": "\n".join(filter(None, (content, *calls)))}


def _call(function: Mapping[str, Any]) -> str:
    made = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(made, ensure_ascii=False)}\n</tool_call>"


def _joined(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages in which results of calls that follow each other are one message of the user."""
    found = list[dict[str, Any]]()
    for message in messages:
        before = found[-1] if found else None
        if before and _is_result(before) and _is_result(message):
            found[-1] = {**before, "content": f"{before['content']}\n{message['content']}"}
        else:
            found.append(message)
    return found


def _is_result(message: Mapping[str, Any]) -> bool:
    return message["role"] == "user" and str(message["content"]).startswith(_RESULT)
