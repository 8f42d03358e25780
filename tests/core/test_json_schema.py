"""Schemas get closed objects unless they say otherwise."""

from typing import Any

import pytest

from offspec.core.constraint import Constraint
from offspec.core.json_schema import forbid_extra_properties

A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
CLOSED = {**A, "additionalProperties": False}
B: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "string"}}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "an object": (A, CLOSED),
    "one within": (
        {"type": "object", "properties": {"x": A}},
        {"type": "object", "properties": {"x": CLOSED}, "additionalProperties": False},
    ),
    "items": ({"type": "array", "items": A}, {"type": "array", "items": CLOSED}),
    "alternatives": ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
    "a definition": (
        {"$defs": {"x": A}, "type": "array", "items": {"$ref": "#/$defs/x"}},
        {"$defs": {"x": CLOSED}, "type": "array", "items": {"$ref": "#/$defs/x"}},
    ),
    "any object": ({"type": "object"}, {"type": "object"}),
    "open by its own word": ({**A, "additionalProperties": True}, {**A, "additionalProperties": True}),
    "patterns": ({**A, "patternProperties": {}}, {**A, "patternProperties": {}}),
    "parts of one": ({"allOf": [A, B]}, {"allOf": [A, B]}),
    "more than it names": ({**A, "anyOf": [B]}, {**A, "anyOf": [B]}),
    "a reference that is a part": (
        {"$defs": {"x": A}, "allOf": [{"$ref": "#/$defs/x"}, B]},
        {"$defs": {"x": A}, "allOf": [{"$ref": "#/$defs/x"}, B]},
    ),
    "what is missing is allowed": (
        {**A, "required": ["b"]},
        {**A, "required": ["b"]},
    ),
    "no schema in a value": (
        {"properties": {"a": {"default": {"allOf": 5}}, "allOf": True}},
        {"properties": {"a": {"default": {"allOf": 5}}, "allOf": True}, "additionalProperties": False},
    ),
    "a property of that name": (
        {"type": "object", "properties": {"properties": A}},
        {"type": "object", "properties": {"properties": CLOSED}, "additionalProperties": False},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_closed_schemas(case: str) -> None:
    given, expected = CASES[case]
    before = repr(given)
    assert forbid_extra_properties(given) == expected
    assert repr(given) == before


def test_formats_with_closed_schemas() -> None:
    assert Constraint("json_schema", A).closed == Constraint("json_schema", CLOSED)
    regex = Constraint("regex", "a+")
    assert regex.closed is regex
