"""JSON schemas that forbid properties that they do not name.

JSON Schema allows extra properties by default, and small models may then add properties without end.
llama.cpp forbids them, too. A schema's own rules for extra properties are kept.
"""

from collections.abc import Iterator, Mapping
from typing import Any

_OPEN = ("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames")
_COMPOSED = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "$ref")
_VALUES = ("default", "const", "enum", "examples")  # keywords whose values are not schemas
_SCHEMAS = ("properties", "$defs", "definitions", "patternProperties")  # schemas by their names


def forbid_extra_properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema that forbids extra properties, except in schemas that describe part of an object."""
    found: dict[str, Any] = _closed(schema, frozenset(_parts(schema)))
    return found


def _closed(schema: Any, parts: frozenset[str], path: str = "#", part: bool = False) -> Any:
    """Return a schema without extra properties.

    path: JSON pointer of the schema. part: whether it is part of a composed schema, which may add properties.
    """
    if not isinstance(schema, Mapping):
        return schema
    part = part or path in parts
    found = dict(schema)
    for name, value in schema.items():
        inner = part or _is_joined(name, value) or name in ("not", "if", "then", "else")
        if name in _SCHEMAS and isinstance(value, Mapping):
            found[name] = {key: _closed(each, parts, f"{path}/{name}/{key}") for key, each in value.items()}
        elif name in ("allOf", "anyOf", "oneOf", "prefixItems") and isinstance(value, list):
            mixed = name != "prefixItems" and "properties" in schema
            found[name] = [_closed(each, parts, f"{path}/{name}", inner or mixed) for each in value]
        elif name in ("items", "additionalProperties", "not", "if", "then", "else"):
            found[name] = _closed(value, parts, f"{path}/{name}", inner and name not in ("items",))
    properties = schema.get("properties")
    if not part and isinstance(properties, Mapping) and properties and _may_close(schema, properties):
        found["additionalProperties"] = False
    return found


def _may_close(schema: Mapping[str, Any], properties: Mapping[str, Any]) -> bool:
    """Return whether extra properties can be forbidden for an object with these properties."""
    required = schema.get("required")
    if isinstance(required, list) and any(name not in properties for name in required):
        return False
    return not any(name in schema for name in (*_OPEN, *_COMPOSED))


def _is_joined(name: str, value: Any) -> bool:
    """Return whether a keyword requires an object to match several schemas at once."""
    return name == "allOf" and isinstance(value, list) and len(value) > 1


def _parts(schema: Any, within: bool = False) -> Iterator[str]:
    """Yield the references to schemas that are parts of composed schemas."""
    if isinstance(schema, list):
        for each in schema:
            yield from _parts(each, within)
    if not isinstance(schema, Mapping):
        return
    for name, value in schema.items():
        if name == "$ref" and isinstance(value, str) and (within or len(schema) > 1):
            yield value
        elif name in _SCHEMAS:
            yield from _parts(list(value.values()) if isinstance(value, Mapping) else value, within)
        elif name not in _VALUES:
            yield from _parts(value, within or _is_joined(name, value) or name == "not")
