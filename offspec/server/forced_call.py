"""An answer that must be a call, of a model whose own form of calls is unknown: an object with a schema."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from offspec.core.errors import RequestError
from offspec.server.exchange import Ask
from offspec.server.faults import Fault, of_error
from offspec.server.formats import checked


def forces_call(ask: Ask) -> bool:
    """Whether the answer must be a call."""
    return ask.tools.choice not in ("none", "auto")


def with_forced_call(ask: Ask) -> Ask:
    """The request with the format {"name": …, "arguments": …} of its tools. Raises Fault."""
    if ask.params.format is not None:
        raise _refused("the answer cannot have another format as well")
    tools = [tool["function"] for tool in ask.tools.callable]
    definitions = dict[str, Any]()
    schema: dict[str, Any] = {"anyOf": [_call(tool, definitions) for tool in tools]}
    format = checked("tools", "json_schema", {**schema, "$defs": definitions})
    try:
        return replace(ask, params=replace(ask.params, format=format), one_call=True)
    except RequestError as error:
        raise of_error(error) from None


def _call(tool: Mapping[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of a call; what its parameters define goes to the top, where references look for it."""
    parameters = {"type": "object", **(tool.get("parameters") or {})}
    for name, definition in parameters.pop("$defs", {}).items():
        if definitions.setdefault(name, definition) != definition:
            raise _refused(f"several tools define {name!r} in their $defs; name one tool")
    return {
        "type": "object",
        "properties": {"name": {"const": tool["name"]}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _refused(why: str) -> Fault:
    return Fault("invalid_request", f"tool_choice: {why}", field="tool_choice")
