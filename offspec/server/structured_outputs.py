"""The format of an answer: what a body asks for, in OpenAI's words and in vLLM's, or a call that is required.

A required call is an object with a schema if the form of the model's own calls is unknown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from offspec.core.constraint import Constraint
from offspec.core.errors import RequestError
from offspec.sampling.grammar import check_format
from offspec.server.api_errors import invalid
from offspec.server.protocol import GenerateRequest
from offspec.server.settings import Settings

if TYPE_CHECKING:
    from offspec.engine.engine import Engine

_KINDS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}


class JsonSchema(msgspec.Struct):
    """A schema; every answer has it, `strict` or not."""

    schema: dict[str, Any] | None = None
    name: Any = None  # without effect, as is the description
    description: Any = None


class ResponseFormat(msgspec.Struct):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, omit_defaults=True):
    """vLLM's `structured_outputs`, one of them."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


def format_of(response: ResponseFormat | None, structured: StructuredOutputs | None) -> Constraint | None:
    """The format that a body sets; None for text. Raises ApiError for two formats, or an impossible one."""
    given = msgspec.structs.asdict(structured) if structured is not None else {}
    given = {name: value for name, value in given.items() if value is not None}
    if structured is not None and len(given) != 1:
        raise invalid("structured_outputs", "it must have one of json, regex, choice and grammar")
    if given and response is not None and response.type != "text":
        raise invalid(
            "structured_outputs", "response_format asks for a format as well; leave one of them out"
        )
    for name, value in given.items():
        return checked_constraint(f"structured_outputs.{name}", _KINDS[name], value)
    if response is None or response.type == "text":
        return None
    if response.type == "json_object":
        return Constraint("json_object")
    if response.json_schema is None:
        raise invalid("response_format.json_schema", "it is missing")
    schema = {} if response.json_schema.schema is None else response.json_schema.schema
    return checked_constraint("response_format.json_schema.schema", "json_schema", schema)


def checked_constraint(field: str, kind: str, value: Any) -> Constraint:
    """A format that can be followed. field: of the body. Raises ApiError."""
    try:
        format = Constraint(kind, value)
        check_format(format)
    except RequestError as error:
        raise invalid(field, str(error)) from None
    return format


def with_format(
    ask: GenerateRequest, ids: Sequence[int], engine: "Engine", settings: Settings
) -> GenerateRequest:
    """The request with the format of its answer: of calls that it may make, and after reasoning.

    ids: its prompt. Raises ApiError, OffspecError.
    """
    if ask.params.format is not None and not settings.open_schemas:
        ask = replace(ask, params=replace(ask.params, format=ask.params.format.closed))
    params, forced = ask.params, ask.tools.choice not in ("none", "auto")
    tools = ask.tools.allowed_functions if forced or settings.tool_grammar else ()
    if ask.raw or not (tools or params.format) or (params.ignore_eos and not forced):
        return ask
    thought = min(params.max_tokens, engine.context - len(ids)) // 2
    format = engine.answer_format(ids, tools, params.format, thought, required=forced)
    if forced and (format is None or params.format is not None):
        ask = replace(ask, params=replace(params, format=_forced_call(ask)), one_call=True)
        format = engine.answer_format(ids, (), ask.params.format, thought)
    return replace(ask, params=replace(ask.params, format=format))


def _forced_call(ask: GenerateRequest) -> Constraint:
    """The format {"name": …, "arguments": …} of a request's tools. Raises ApiError."""
    if ask.params.format is not None:
        raise invalid("tool_choice", "the answer cannot have another format as well")
    tools = [tool["function"] for tool in ask.tools.allowed_functions]
    definitions = dict[str, Any]()
    schema: dict[str, Any] = {"anyOf": [_call_schema(tool, definitions) for tool in tools]}
    return checked_constraint("tools", "json_schema", {**schema, "$defs": definitions})


def _call_schema(tool: Mapping[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of a call; what its parameters define goes to the top, where references look for it."""
    parameters = {"type": "object", **(tool.get("parameters") or {})}
    for name, definition in parameters.pop("$defs", {}).items():
        if definitions.setdefault(name, definition) != definition:
            raise invalid("tool_choice", f"several tools define {name!r} in their $defs; name one tool")
    return {
        "type": "object",
        "properties": {"name": {"const": tool["name"]}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
