"""The format that a body asks its answer for, in OpenAI's words and in vLLM's."""

from typing import Any, Literal

import msgspec

from offspec.core.constraint import Constraint
from offspec.core.errors import RequestError
from offspec.sampling.grammar import check_format
from offspec.server.faults import Fault

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
    """What a body asks for; None for text. Raises Fault for both, or for what cannot be followed."""
    given = msgspec.structs.asdict(structured) if structured is not None else {}
    given = {name: value for name, value in given.items() if value is not None}
    if structured is not None and len(given) != 1:
        raise _fault("structured_outputs", "it must have one of json, regex, choice and grammar")
    if given and response is not None and response.type != "text":
        raise _fault("structured_outputs", "response_format asks for a format as well; leave one of them out")
    for name, value in given.items():
        return checked(f"structured_outputs.{name}", _KINDS[name], value)
    if response is None or response.type == "text":
        return None
    if response.type == "json_object":
        return Constraint("json_object")
    if response.json_schema is None:
        raise _fault("response_format.json_schema", "it is missing")
    schema = {} if response.json_schema.schema is None else response.json_schema.schema
    return checked("response_format.json_schema.schema", "json_schema", schema)


def checked(field: str, kind: str, value: Any) -> Constraint:
    """A format that can be followed. field: of the body. Raises Fault."""
    try:
        format = Constraint(kind, value)
        check_format(format)
    except RequestError as error:
        raise _fault(field, str(error)) from None
    return format


def _fault(field: str, message: str) -> Fault:
    return Fault("invalid_request", f"{field}: {message}", field=field)
