"""A simple JSON Schema validator for the schemas in `schemas.jsonl`, to check answers with."""

import json
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

SCHEMAS: list[dict[str, Any]] = [
    json.loads(line) for line in Path(__file__).with_name("schemas.jsonl").read_text("utf-8").splitlines()
]
_KINDS: Mapping[str, Callable[[Any], bool]] = {
    "array": lambda value: isinstance(value, list),
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
    "string": lambda value: isinstance(value, str),
}
_FORMATS = {
    "date": r"\d{4}-\d\d-\d\d",
    "date-time": r"\d{4}-\d\d-\d\d[Tt].+",
    "ipv4": r"\d{1,3}(\.\d{1,3}){3}",
    "time": r"\d\d:\d\d:\d\d.*",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}
_ANNOTATIONS = {"title", "description", "default", "$schema", "$defs", "definitions"}


def is_valid(value: Any, schema: Any, root: Any = None) -> bool:
    """Return whether a JSON value is valid. Raises KeyError for an unsupported keyword."""
    if isinstance(schema, bool):
        return schema
    root = schema if root is None else root
    return all(
        _KEYWORDS[key](value, argument, schema, root)
        for key, argument in schema.items()
        if key not in _ANNOTATIONS
    )


def _is_equal(left: Any, right: Any) -> bool:
    return json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)


def _resolved(pointer: str, root: Any) -> Any:
    for part in pointer.removeprefix("#/").split("/"):
        root = root[part]
    return root


def _properties(value: Any, schema: Any, root: Any) -> bool:
    """Check properties, patternProperties and additionalProperties together."""
    if not isinstance(value, dict):
        return True
    for name, item in value.items():
        known = [inner for key, inner in schema.get("properties", {}).items() if key == name]
        known += [i for pattern, i in schema.get("patternProperties", {}).items() if re.search(pattern, name)]
        if not all(
            is_valid(item, inner, root) for inner in known or [schema.get("additionalProperties", True)]
        ):
            return False
    return True


def _items(value: Any, schema: Any, root: Any) -> bool:
    if not isinstance(value, list):
        return True
    first = schema.get("prefixItems", [])
    kinds = [*first, *[schema.get("items", True)] * (len(value) - len(first))]
    return all(is_valid(item, kind, root) for item, kind in zip(value, kinds, strict=False))


def _number(holds: Callable[[Any, Any], bool]) -> Callable[..., bool]:
    return lambda value, bound, *_: not _KINDS["number"](value) or holds(value, bound)


def _length(kind: type, holds: Callable[[int, int], bool]) -> Callable[..., bool]:
    return lambda value, bound, *_: not isinstance(value, kind) or holds(len(value), bound)


def _text(holds: Callable[[str, str], Any]) -> Callable[..., bool]:
    return lambda value, argument, *_: not isinstance(value, str) or bool(holds(value, argument))


def _at_least(size: int, bound: int) -> bool:
    return size >= bound


def _at_most(size: int, bound: int) -> bool:
    return size <= bound


_KEYWORDS: dict[str, Callable[..., bool]] = {
    "type": lambda value, kinds, *_: any(
        _KINDS[kind](value) for kind in (kinds if isinstance(kinds, list) else [kinds])
    ),
    "enum": lambda value, values, *_: any(_is_equal(value, one) for one in values),
    "const": lambda value, one, *_: _is_equal(value, one),
    "anyOf": lambda value, schemas, _, root: any(is_valid(value, one, root) for one in schemas),
    "oneOf": lambda value, schemas, _, root: sum(is_valid(value, one, root) for one in schemas) == 1,
    "allOf": lambda value, schemas, _, root: all(is_valid(value, one, root) for one in schemas),
    "$ref": lambda value, pointer, _, root: is_valid(value, _resolved(pointer, root), root),
    "minimum": _number(lambda value, bound: value >= bound),
    "maximum": _number(lambda value, bound: value <= bound),
    "exclusiveMinimum": _number(lambda value, bound: value > bound),
    "exclusiveMaximum": _number(lambda value, bound: value < bound),
    "multipleOf": _number(lambda value, step: Fraction(str(value)) % Fraction(str(step)) == 0),
    "minLength": _length(str, _at_least),
    "maxLength": _length(str, _at_most),
    "minItems": _length(list, _at_least),
    "maxItems": _length(list, _at_most),
    "minProperties": _length(dict, _at_least),
    "maxProperties": _length(dict, _at_most),
    "pattern": _text(lambda value, pattern: re.search(pattern, value)),
    "format": _text(lambda value, name: re.fullmatch(_FORMATS[name], value)),
    "required": lambda value, names, *_: not isinstance(value, dict) or set(names) <= value.keys(),
    "properties": lambda value, _, schema, root: _properties(value, schema, root),
    "patternProperties": lambda value, _, schema, root: _properties(value, schema, root),
    "additionalProperties": lambda value, _, schema, root: _properties(value, schema, root),
    "items": lambda value, _, schema, root: _items(value, schema, root),
    "prefixItems": lambda value, _, schema, root: _items(value, schema, root),
}
