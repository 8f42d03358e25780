"""Request bodies: conversion from JSON to the struct of an API. Unknown fields are ignored and reported.

New releases of clients often send new fields. A field affects an answer only if a struct declares it; all
other fields are dropped and reported. `null` and an empty list are the same as an omitted field.
"""

import re
from collections.abc import Hashable
from functools import cache
from typing import Any, TypeVar, cast

import msgspec
from msgspec import inspect

from offspec.server.api_errors import ApiError, missing, unsupported

# Fields without effect on an answer. They are accepted everywhere and not reported.
_HINTS = """
user metadata client_metadata service_tier safety_identifier id status phase prompt_cache_key
prompt_cache_retention prompt_cache_options cache_control keep_alive signature annotations citations
encrypted_content caller strict budget_tokens
"""
# Fields without effect here whose senders may expect an effect. They are refused in strict mode.
_SOFT_HINTS = """
verbosity prediction context_management display toolset_name namespace summary reasoning_details
generate_summary moderation inference_geo speed betas defer_loading allowed_callers input_examples
eager_input_streaming output_schema include_obfuscation detail max_tool_calls include_reasoning exclude
"""
HINTS, SOFT_HINTS = frozenset(_HINTS.split()), frozenset(_SOFT_HINTS.split())

_PLACE = re.compile(r" - at (`key` in )?`\$(?P<path>[^`]*)`$")
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_SIGNS = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}
_INDEX = re.compile(r"\[\d+\]")
_T = TypeVar("_T")


def parse(body: bytes, *, name: str = "the body") -> Any:
    """Decode JSON. Raises ApiError, which calls the text `name`, if it is invalid."""
    try:
        return msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:  # malformed JSON, not UTF-8, or nested too deeply
        raise ApiError(
            "invalid_request", f"{name} is not valid JSON{_json_error(error)}", code="invalid_json"
        ) from None


def convert(
    value: Any,
    target: type[_T],
    *,
    ignored: list[str] | None = None,
    text: bool = False,
    name: str = "the body",
) -> _T:
    """Convert parsed JSON to a type.

    Args:
        value: Parsed JSON.
        target: Struct, or another type that msgspec supports.
        ignored: List that receives the paths of dropped fields, such as "messages[0].mood". None: unknown
            fields are refused.
        text: Whether numbers may be strings, as in the query of a URL.
        name: Name of the whole value in errors.

    Raises:
        ApiError: A field is missing, unknown, or has a value of the wrong type.
    """
    unknown = list[str]()
    try:
        value = _known(value, _info(cast("Hashable", target)), "", unknown, ignored is None)
        if ignored is None and unknown:
            raise unsupported(unknown[0], "unknown or unsupported; omit it")
        converted = msgspec.convert(value, type=target, strict=not text)
    except msgspec.ValidationError as error:
        raise _validation_error(str(error), name) from None
    except RecursionError:
        raise ApiError("invalid_request", f"{name} is nested too deeply", code="invalid_json") from None
    if ignored is not None:
        ignored += unknown
    return converted


def _json_error(error: Exception) -> str:
    """Return the reason why JSON is invalid, or its position, as a suffix for a message; "" if unknown."""
    if isinstance(error, RecursionError):
        return ": it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f": it is not UTF-8 at byte {error.start}"
    if match := re.search(r"\(byte (\d+)\)", str(error)):
        return f" at byte {match[1]}"
    return ": it ends too early" if "truncated" in str(error) else ""


def field_name(path: str) -> str:
    """Return the path of a field without indices, such as "messages.mood" for "messages[3].mood"."""
    return _INDEX.sub("", path)


def _known(value: Any, kind: inspect.Type, path: str, unknown: list[str], strict: bool) -> Any:
    """Return a value without unknown and empty fields.

    Args:
        value: Parsed JSON.
        kind: Type of the value.
        path: Path of the value in the body.
        unknown: List that receives the paths of unknown fields.
        strict: Whether fields of `SOFT_HINTS` count as unknown.
    """
    if isinstance(value, dict) and (struct := _part(kind, inspect.StructType)) is not None:
        fields, kept = _fields(struct.cls), dict[str, Any]()
        for name, item in value.items():
            item_path = f"{path}.{name}" if path else name
            if name not in fields:
                if name not in HINTS and (strict or name not in SOFT_HINTS) and _is_set(item):
                    unknown.append(item_path)
            elif _is_set(item) or (item is not None and fields[name].required):  # an empty list
                kept[name] = _known(item, fields[name].type, item_path, unknown, strict)
        return kept
    if isinstance(value, list) and (several := _part(kind, inspect.ListType)) is not None:
        kind = several.item_type
        return [_known(item, kind, f"{path}[{at}]", unknown, strict) for at, item in enumerate(value)]
    return value


def _is_set(item: Any) -> bool:
    return item is not None and item != []


def _part(kind: inspect.Type, alternative: type[_T]) -> _T | None:
    """Return the first alternative of a type that has this class, or None."""
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    kinds = tuple(each.type if isinstance(each, inspect.Metadata) else each for each in kinds)
    return next((each for each in kinds if isinstance(each, alternative)), None)


@cache
def _info(kind: Hashable) -> inspect.Type:
    return inspect.type_info(kind)


@cache
def _fields(struct: type) -> dict[str, inspect.Field]:
    info = _info(struct)
    assert isinstance(info, inspect.StructType)
    return {field.encode_name: field for field in info.fields}


def _validation_error(text: str, name: str) -> ApiError:
    """Return the error for a message of msgspec: the field and its requirement.

    Args:
        text: The message.
        name: Name of the whole value.
    """
    place = _PLACE.search(text)
    path = place["path"].removeprefix(".").replace("[...]", "") if place else ""
    reason = text[: place.start()] if place else text
    if absent := _MISSING.match(reason):
        return missing(f"{path}.{absent['name']}" if path else absent["name"])
    return ApiError("invalid_request", f"{path or name} {_requirement(reason)}", field=path or None)


def _requirement(reason: str) -> str:
    """Return the requirement on a value, from the beginning of a message of msgspec."""
    if match := re.match(r"Expected `(?P<kinds>[^`]*)`, got `(?P<received>[^`]*)`", reason):
        kinds = [_KINDS.get(kind, kind) for kind in match["kinds"].split(" | ") if kind != "null"]
        received = match["received"]
        received = "a fraction" if received == "float" else _KINDS.get(received, received)
        return f"must be {' or '.join(kinds)}, not {received}"
    if match := re.match(
        r"Expected `(?P<kind>\w+)`(?P<size> of length)? (?P<sign>[<>]=?) (?P<limit>\S+)", reason
    ):
        if match["size"] and (match["sign"], match["limit"]) == (">=", "1"):
            return "must not be empty"
        limit = f"{_SIGNS[match['sign']]} {match['limit']}"
        unit = " characters" if match["kind"] == "str" else " items"
        return f"must have {limit}{unit}" if match["size"] else f"must be {limit}"
    if match := re.match(r"Invalid (?:enum )?value (?P<value>.*)", reason):
        return f"has the unknown value {match['value']}"
    return "has an invalid value"
