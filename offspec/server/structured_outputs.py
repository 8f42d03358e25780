"""Structured outputs: formats of answers in OpenAI's and vLLM's fields, and required tool calls.

If the format of the model's own calls is unknown, a required call is a JSON object with a schema.
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
    """JSON schema. It is enforced whether `strict` is set or not."""

    schema: dict[str, Any] | None = None
    name: Any = None  # ignored
    description: Any = None  # ignored


class ResponseFormat(msgspec.Struct):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, omit_defaults=True):
    """vLLM's `structured_outputs`, of which one field must be set."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


def format_of(response: ResponseFormat | None, structured: StructuredOutputs | None) -> Constraint | None:
    """Return the answer format of a body, or None for plain text.

    Raises ApiError if the body sets two formats, or a format that is not supported.
    """
    fields = msgspec.structs.asdict(structured) if structured is not None else {}
    fields = {name: value for name, value in fields.items() if value is not None}
    if structured is not None and len(fields) != 1:
        raise invalid("structured_outputs", "it must have one of json, regex, choice and grammar")
    if fields and response is not None and response.type != "text":
        raise invalid("structured_outputs", "response_format also sets a format; omit one of them")
    for name, value in fields.items():
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
    """Return a format after checking it. Raises ApiError if it is invalid or not supported.

    Args:
        field: Path of the format in the body, for errors.
        kind: Kind of `Constraint`.
        value: Schema, regular expression, list of choices or grammar.
    """
    try:
        format = Constraint(kind, value)
        try:
            check_format(format.closed)
        except RequestError:
            check_format(format)  # enforced as it is with `--open-schemas`
    except RequestError as error:
        raise invalid(field, str(error)) from None
    return format


def with_format(
    request: GenerateRequest, ids: Sequence[int], engine: "Engine", settings: Settings
) -> GenerateRequest:
    """Return the request with a format that also covers tool calls and the reasoning before the answer.

    Raises ApiError or OffspecError if there is no such format.

    Args:
        request: The request.
        ids: Token ids of its prompt.
        engine: Engine of the model.
        settings: Settings of the server.
    """
    if request.params.format is not None and not settings.open_schemas:
        request = replace(request, params=replace(request.params, format=request.params.format.closed))
    params, required = request.params, request.tools.choice not in ("none", "auto")
    tools = request.tools.allowed_functions if required or settings.tool_grammar else ()
    if request.raw or not (tools or params.format) or (params.ignore_eos and not required):
        return request
    reasoning = min(params.max_tokens, engine.context - len(ids)) // 2  # maximum tokens
    format = engine.answer_format(ids, tools, params.format, reasoning, required=required)
    if required and (format is None or params.format is not None):
        request = replace(request, params=replace(params, format=_required_call(request)), one_call=True)
        format = engine.answer_format(ids, (), request.params.format, reasoning)
    return replace(request, params=replace(request.params, format=format))


def _required_call(request: GenerateRequest) -> Constraint:
    """Return the format {"name": …, "arguments": …} for a request's tools. Raises ApiError."""
    if request.params.format is not None:
        raise invalid("tool_choice", "a required call cannot be combined with another format")
    tools = [tool["function"] for tool in request.tools.allowed_functions]
    definitions = dict[str, Any]()
    schema: dict[str, Any] = {"anyOf": [_call_schema(tool, definitions) for tool in tools]}
    return checked_constraint("tools", "json_schema", {**schema, "$defs": definitions})


def _call_schema(tool: Mapping[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a call, and move its `$defs` to `definitions`, which references resolve to."""
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
