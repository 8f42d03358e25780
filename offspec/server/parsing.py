"""Bodies of requests: from JSON to the struct of an API, which ignores fields that it does not have.

Each release of a client sends fields that no server knew before. A field changes an answer here only if a
struct declares it; every other field is left out and reported. `null` and an empty list mean "not given".
"""

import re
from collections.abc import Hashable
from functools import cache
from typing import Any, TypeVar, cast

import msgspec
from msgspec import inspect

from offspec.server.api_errors import ApiError, missing, unsupported

# Fields without effect on an answer: accepted everywhere, and not reported.
_HINTS = """
user metadata client_metadata service_tier safety_identifier id status phase prompt_cache_key
prompt_cache_retention prompt_cache_options cache_control keep_alive signature annotations citations
encrypted_content caller strict budget_tokens
"""
# The same, but some callers hope for an effect: refused in strict mode.
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
    """Decode JSON. name: of the text in errors. Raises ApiError."""
    try:
        return msgspec.json.decode(body)
    # Malformed JSON, bytes that are not UTF-8, too many brackets.
    except (ValueError, RecursionError) as error:
        raise ApiError(
            "invalid_request", f"{name} is not valid JSON{_json_fault(error)}", code="invalid_json"
        ) from None


def convert(
    value: Any,
    wanted: type[_T],
    *,
    ignored: list[str] | None = None,
    text: bool = False,
    name: str = "the body",
) -> _T:
    """Convert parsed JSON to a type.

    Args:
        value: Parsed JSON.
        wanted: A struct, or another type that msgspec knows.
        ignored: Takes the paths of fields that were left out, such as "messages[0].mood". None: a field that
            no struct has is refused.
        text: Whether numbers may come as text, as in the query of an address.
        name: Name of the whole value in errors.

    Raises:
        ApiError: A field has a value of another type or is missing.
    """
    unknown = list[str]()
    try:
        value = _known(value, _info(cast("Hashable", wanted)), "", unknown, ignored is None)
        if ignored is None and unknown:
            raise unsupported(unknown[0], "it is not known or not supported here; leave it out")
        converted = msgspec.convert(value, type=wanted, strict=not text)
    except msgspec.ValidationError as error:
        raise _of_validation(str(error), name) from None
    except RecursionError:
        raise ApiError("invalid_request", f"{name} is nested too deeply", code="invalid_json") from None
    if ignored is not None:
        ignored += unknown
    return converted


def _json_fault(error: Exception) -> str:
    """Return where JSON is invalid: at a byte, or nowhere in particular."""
    if isinstance(error, RecursionError):
        return ": it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f": it is not UTF-8 at byte {error.start}"
    if found := re.search(r"\(byte (\d+)\)", str(error)):
        return f" at byte {found[1]}"
    return ": it ends too early" if "truncated" in str(error) else ""


def field_name(path: str) -> str:
    """The name of a field in all its places: "messages.mood" of "messages[3].mood"."""
    return _INDEX.sub("", path)


def _known(value: Any, kind: inspect.Type, path: str, unknown: list[str], strict: bool) -> Any:
    """A value with only those fields that its type has and that are given. unknown: takes other fields."""
    if isinstance(value, dict) and (struct := _part(kind, inspect.StructType)) is not None:
        fields, kept = _fields(struct.cls), dict[str, Any]()
        for name, item in value.items():
            where = f"{path}.{name}" if path else name
            if name not in fields:
                if name not in HINTS and (strict or name not in SOFT_HINTS) and _given(item):
                    unknown.append(where)
            elif _given(item) or (item is not None and fields[name].required):  # an empty list
                kept[name] = _known(item, fields[name].type, where, unknown, strict)
        return kept
    if isinstance(value, list) and (several := _part(kind, inspect.ListType)) is not None:
        kind = several.item_type
        return [_known(item, kind, f"{path}[{at}]", unknown, strict) for at, item in enumerate(value)]
    return value


def _given(item: Any) -> bool:
    return item is not None and item != []


def _part(kind: inspect.Type, wanted: type[_T]) -> _T | None:
    """The first alternative of a type that is of this kind."""
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    kinds = tuple(each.type if isinstance(each, inspect.Metadata) else each for each in kinds)
    return next((each for each in kinds if isinstance(each, wanted)), None)


@cache
def _info(wanted: Hashable) -> inspect.Type:
    return inspect.type_info(wanted)


@cache
def _fields(struct: type) -> dict[str, inspect.Field]:
    info = _info(struct)
    assert isinstance(info, inspect.StructType)
    return {field.encode_name: field for field in info.fields}


def _of_validation(text: str, name: str) -> ApiError:
    """Return the error for a message of msgspec, in our words: the field and what it must be.

    name: of the whole value.
    """
    place = _PLACE.search(text)
    path = place["path"].removeprefix(".").replace("[...]", "") if place else ""
    reason = text[: place.start()] if place else text
    if absent := _MISSING.match(reason):
        return missing(f"{path}.{absent['name']}" if path else absent["name"])
    return ApiError("invalid_request", f"{path or name} {_requirement(reason)}", field=path or None)


def _requirement(reason: str) -> str:
    """Return what a value must be, from the beginning of a message of msgspec."""
    if found := re.match(r"Expected `(?P<kinds>[^`]*)`, got `(?P<given>[^`]*)`", reason):
        kinds = [_KINDS.get(kind, kind) for kind in found["kinds"].split(" | ") if kind != "null"]
        given = "a fraction" if found["given"] == "float" else _KINDS.get(found["given"], found["given"])
        return f"must be {' or '.join(kinds)}, not {given}"
    if found := re.match(
        r"Expected `(?P<kind>\w+)`(?P<size> of length)? (?P<sign>[<>]=?) (?P<limit>\S+)", reason
    ):
        if found["size"] and (found["sign"], found["limit"]) == (">=", "1"):
            return "must not be empty"
        limit = f"{_SIGNS[found['sign']]} {found['limit']}"
        unit = " characters" if found["kind"] == "str" else " items"
        return f"must have {limit}{unit}" if found["size"] else f"must be {limit}"
    if found := re.match(r"Invalid (?:enum )?value (?P<value>.*)", reason):
        return f"has the unknown value {found['value']}"
    return "has an invalid value"
