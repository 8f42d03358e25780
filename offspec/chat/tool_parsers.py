"""Incremental parsers of tool calls, which accept only complete calls that are valid by the tool's schema.

A parser starts at the mark that opens a call and continues as text arrives. A value ends according to its own
syntax, so that marks inside a value are part of the value.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import regex

from offspec.chat.answer_parser import ToolCall, parse_tool_call

_TYPING = ("type", "anyOf", "oneOf", "allOf", "enum", "const", "$ref")  # keywords that may allow strings
_STRING_END = regex.compile(r'["\\]')
_STRUCTURE = regex.compile(r"[^\s\w.+\-:,]")  # brackets, quotes, and characters that are not JSON


@dataclass(frozen=True, slots=True)
class ParsedCalls:
    """Calls parsed from a text, and the position at which they end.

    reasoning_end: mark that ends the reasoning that begins at this position; "" if none begins.
    text: whether text of the answer begins at this position.
    """

    calls: tuple[ToolCall, ...]
    end: int
    reasoning_end: str = ""
    text: bool = False


class ToolParser(Protocol):
    """Parser of one call, or of several calls that belong together."""

    def read(self, text: str, final: bool) -> ParsedCalls | bool:
        """Continue parsing.

        Args:
            text: All text so far, beginning with the opening mark.
            final: Whether no more text will follow.

        Returns:
            The parsed calls; True if more text is needed; False if this is not a call.
        """


class ToolSchemas:
    """Schemas of the available tools, given as {"type": "function", "function": {"name", "parameters"}}."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._parameters = {
            tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools
        }

    def __bool__(self) -> bool:
        return bool(self._parameters)

    def properties(self, name: str) -> Mapping[str, Any]:
        """Return the schemas of a tool's parameters."""
        found = self._parameters.get(name, {}).get("properties")
        return found if isinstance(found, Mapping) else {}

    def value(self, name: str, key: str, text: str) -> Any:
        """Return a parameter's value: its text parsed as JSON if the schema allows that, else the text."""
        parameters = self._parameters.get(name, {})
        schema = self.properties(name).get(key)
        kinds = schema.get("type") if isinstance(schema, dict) else None
        if kinds == "string":
            return text
        definitions = {each: parameters[each] for each in ("$defs", "definitions") if each in parameters}
        schema = {**definitions, **schema} if isinstance(schema, dict) else {}
        if text != "null" and not schema.keys().isdisjoint(_TYPING) and _is_valid(text, schema):
            return text
        found = _json(text)
        return found if _is_valid(found, schema) else text

    def call(self, name: Any, arguments: Any) -> ToolCall | None:
        """Return a call if the tool exists and its schema allows the arguments, else None."""
        call = parse_tool_call({"name": name, "arguments": arguments})
        if call is None or call.name not in self._parameters:
            return None
        return call if _is_valid(json.loads(call.arguments), self._parameters[call.name]) else None


def _is_valid(value: Any, schema: Mapping[str, Any]) -> bool:
    try:
        from referencing import Registry

        return bool(_validator()(schema, registry=Registry()).is_valid(value))  # nothing is fetched
    except Exception:  # an unusable schema allows everything
        return True


@cache
def _validator() -> Any:
    """Return a validator class that ignores patterns, because a client's pattern could take any time."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend

    closed = Draft202012Validator.VALIDATORS["additionalProperties"]

    def other_properties(validator: Any, open: Any, value: Any, schema: Any) -> Any:
        return None if "patternProperties" in schema else closed(validator, open, value, schema)

    def anything(*_: Any) -> None:
        return None

    changed = {"pattern": anything, "patternProperties": anything, "additionalProperties": other_properties}
    return extend(Draft202012Validator, changed)


class JsonEnd:
    """Scanner that finds the end of a JSON value in growing text."""

    def __init__(self, start: int) -> None:
        self._at, self._depth, self._in_string = start, 0, False

    def find(self, text: str) -> int | bool:
        """Return the end of the value; True if more text is needed; False if this is not JSON."""
        while True:
            found = (_STRING_END if self._in_string else _STRUCTURE).search(text, self._at)
            if found is None:
                self._at = len(text)
                return True
            sign, place = found[0], found.start()
            if sign == "\\":
                if place + 1 == len(text):
                    self._at = place
                    return True
                self._at = place + 2
                continue
            self._at = place + 1
            if sign == '"':
                self._in_string = not self._in_string
            elif sign in "{[":
                self._depth += 1
            elif sign in "}]":
                self._depth -= 1
            else:
                return False
            if self._depth <= 0 and not self._in_string:
                return self._at if self._depth == 0 and sign in "}]" else False


class JsonToolParser(ToolParser):
    """Parser of a call with JSON arguments: a head, which may contain the name, the value, and a tail.

    Args:
        tools: Available tools.
        head: Pattern from the opening mark to the value; an optional group `name` contains the tool's name.
        tail: Pattern of the closing mark, which an answer may omit.
        arguments: Key of the arguments in a value that also contains the name.
    """

    def __init__(self, tools: ToolSchemas, head: str, tail: str = "", arguments: str = "arguments") -> None:
        self._tools, self._arguments = tools, arguments
        self._head, self._tail = regex.compile(head), regex.compile(tail)
        self._begun: tuple[str | None, int, JsonEnd] | None = None
        self._value: tuple[tuple[ToolCall, ...], int] | None = None

    def read(self, text: str, final: bool) -> ParsedCalls | bool:
        if self._begun is None:
            head = self._head.match(text, partial=not final)
            if head is None or head.partial:
                return head is not None
            self._begun = head.groupdict().get("name"), head.end(), JsonEnd(head.end())
        name, start, scan = self._begun
        if self._value is None:
            end = scan.find(text)
            if isinstance(end, bool):
                return end and not final
            if not (calls := self._calls(name, text[start:end])):
                return False
            self._value = calls, end
        calls, end = self._value
        tail = self._tail.match(text, end, partial=not final)
        if tail is not None and tail.partial:
            return True
        return ParsedCalls(calls, end if tail is None else tail.end())

    def _calls(self, name: str | None, text: str) -> tuple[ToolCall, ...]:
        """Return the calls of a value; none if one of them is invalid."""
        try:
            value = json.loads(text, strict=False)
        except (ValueError, RecursionError):
            return ()
        values = value if isinstance(value, list) else [value]
        given = [(name, value)] if name is not None else [self._named(each) for each in values]
        calls = [self._tools.call(name, arguments) for name, arguments in given]
        return tuple(call for call in calls if call) if all(calls) else ()

    def _named(self, value: Any) -> tuple[Any, Any]:
        """Return the name and arguments of an object that contains both."""
        if not isinstance(value, dict):
            return None, None
        return value.get("name"), value.get(self._arguments)


class TaggedToolParser(ToolParser):
    """Parser of a call with tags: a head with the name, then a tag, value and closing tag per argument.

    A closing tag ends a value only if the next tag follows; a value without one ends at the next tag.

    Args:
        tools: Available tools.
        head: Pattern from the opening mark on; its group `name` contains the tool's name.
        tag: Pattern of an argument's opening tag; its group `key` contains the argument's name.
        close: Pattern of an argument's closing tag.
        end: Pattern of the end of the call.
        tail: Pattern of an additional closing mark, which an answer may omit.
        lines: Whether values are on separate lines.
    """

    def __init__(
        self,
        tools: ToolSchemas,
        head: str,
        tag: str,
        close: str,
        end: str,
        tail: str = "",
        *,
        lines: bool = True,
    ) -> None:
        self._tools = tools
        self._head = regex.compile(head)
        self._end = regex.compile(end)
        self._next = regex.compile(rf"\s*(?:{tag}|(?P<end>{end}))")
        self._lines, gap = lines, r"\n?" if lines else ""
        closed = rf"{close}(?=\s*(?:{tag}|{end}))|(?<=\n)(?={tag}\n)"
        more = tail or "<tool_call>"  # required, because the end mark may be part of a value
        self._value_end = regex.compile(rf"{gap}(?:{closed}|(?={end}\s*{more}))")
        self._last_end = regex.compile(rf"{gap}(?:{closed}|(?={end}\s*(?:{tail})?\s*\Z))")
        self._tail = regex.compile(rf"\s*{tail}" if tail else "")
        self._name: str | None = None
        self._at = 0
        self._key: str | None = None  # key of the value that is being read
        self._start = 0  # start of that value
        self._arguments = dict[str, Any]()

    def read(self, text: str, final: bool) -> ParsedCalls | bool:
        if self._name is None:
            head = self._head.match(text, partial=not final)
            if head is None or head.partial:
                return head is not None
            self._name, self._at = head["name"], head.end()
        if final and self._end.search(text, self._at) is None:
            return False  # the call cannot end
        while True:
            if self._key is not None:
                if not self._read_value(text, final):
                    return not final
                continue
            found = self._next.match(text, self._at, partial=not final)
            if found is None or found.partial:
                return found is not None
            if found["end"] is not None:
                return self._finished(text, found.end(), final)
            self._key, self._at = found["key"], found.end()
            self._start = self._at

    def _read_value(self, text: str, final: bool) -> bool:
        """Read the current value; return whether it has ended."""
        assert self._key is not None and self._name is not None
        while True:
            pattern = self._last_end if final else self._value_end
            found = pattern.search(text, self._at, partial=not final)
            if found is None or found.partial:
                self._at = len(text) if found is None else found.start()
                return False
            key = found.capturesdict().get("key") or []
            known = self._tools.properties(self._name).keys() - {*self._arguments, self._key}
            if known.issuperset(key) or found.end() > found.start() + 1:
                break
            self._at = found.start() + 1  # the tag is part of the value
        value = text[self._start : found.start()].removeprefix("\n" if self._lines else "")
        self._arguments[self._key] = self._tools.value(self._name, self._key, value)
        self._key, self._at = None, found.end()
        return True

    def _finished(self, text: str, end: int, final: bool) -> ParsedCalls | bool:
        tail = self._tail.match(text, end, partial=not final)
        if tail is not None and tail.partial:
            return True
        call = self._tools.call(self._name, self._arguments)
        return False if call is None else ParsedCalls((call,), end if tail is None else tail.end())


def _json(text: str) -> Any:
    """Parse a text as JSON, also accepting True and False; return the text itself if it is not JSON."""
    stripped = text.strip()
    try:
        return json.loads(stripped.lower() if stripped in ("True", "False") else stripped)
    except (ValueError, RecursionError):
        return text
