"""Output constraints: a JSON schema, a regular expression, a choice of texts, or a grammar."""

import json
import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from offspec.core.errors import RequestError
from offspec.core.json_schema import forbid_extra_properties
from offspec.core.values import is_unicode, short_repr

KINDS = ("json_schema", "json_object", "regex", "choice", "grammar", "regions")


@dataclass(frozen=True, slots=True)
class Constraint:
    """Format that a whole answer must have.

    Args:
        kind: "json_schema", "json_object" (any JSON object), "regex", "choice" (one of several texts),
            "grammar" (Lark, or llama.cpp's EBNF) or "regions" (a format for parts of an answer only).
        text: The schema as JSON, the regular expression, the texts as a JSON list, the grammar, or the fields
            of `Regions` as JSON. Schemas, lists and fields may also be Python objects. Empty for
            "json_object".

    Raises:
        RequestError: Unknown kind, or invalid text for the kind, such as a regular expression that does not
            compile. Unsupported features of a schema or a grammar are only reported when the constraint is
            used.
    """

    kind: str
    text: str = ""

    @property
    def closed(self) -> "Constraint":
        """Copy whose JSON schema forbids extra properties; see `forbid_extra_properties`."""
        if self.kind != "json_schema":
            return self
        return replace(self, text=_written(forbid_extra_properties(json.loads(self.text))))

    @classmethod
    def of(cls, given: object) -> "Constraint | None":
        """Return a Constraint from a Constraint, a mapping of its fields, or None. Raises RequestError."""
        if given is None or isinstance(given, Constraint):
            return given
        if not isinstance(given, Mapping) or not {"kind"} <= given.keys() <= {"kind", "text"}:
            raise RequestError(f"format must be a Constraint, or its kind and text, not {short_repr(given)}")
        return cls(**given)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise RequestError(f"a format's kind must be one of {', '.join(KINDS)}, not {self.kind!r}")
        if not isinstance(self.text, str):
            object.__setattr__(self, "text", _written(self.text))
        if not is_unicode(self.text):
            raise RequestError("a format must be valid Unicode text")
        match self.kind:
            case "json_schema":
                if not isinstance(_parsed(self.text, "a JSON schema"), dict):
                    raise RequestError("a JSON schema must be a JSON object")
            case "choice":
                texts = _parsed(self.text, "a choice")
                if (
                    not isinstance(texts, list)
                    or not texts
                    or not all(isinstance(t, str) and t for t in texts)
                ):
                    raise RequestError("a choice must be a JSON list of texts that are not empty")
            case "regions":
                Regions.read(self.text)
            case "json_object":
                if self.text:
                    raise RequestError(
                        "json_object is any JSON object and takes no text; did you mean json_schema?"
                    )
            case _:
                if not self.text:
                    raise RequestError(f"a {self.kind} must not be empty")
                if self.kind == "regex":
                    _check_regex(self.text)


@dataclass(frozen=True, slots=True)
class Region:
    """Part of an answer with a format: it begins after a mark, and ends when its grammar is complete.

    Args:
        mark: Text that opens the region.
        grammar: Lark grammar of the text after the mark.
        at_start: Whether the mark opens a region only at the beginning of the answer.
    """

    mark: str
    grammar: str
    at_start: bool = False


@dataclass(frozen=True, slots=True)
class Regions:
    """Constrained regions of an answer. Reasoning, and text outside of regions, is unconstrained.

    Args:
        regions: Regions that may occur.
        thought: Marks that begin and end reasoning; None if the model has no reasoning.
        thinking: Whether the answer begins within reasoning.
        required: Lark grammar of the answer after its reasoning; "" if it is unconstrained.
        thought_tokens: Maximum number of reasoning tokens before `required`; None for no limit.
        cut: Lark grammar of the end of reasoning and `required`, used once `thought_tokens` is reached.
    """

    regions: tuple[Region, ...] = ()
    thought: tuple[str, str] | None = None
    thinking: bool = False
    required: str = ""
    thought_tokens: int | None = None
    cut: str = ""

    @property
    def grammars(self) -> tuple[str, ...]:
        """All grammars of the regions, `required` and `cut`."""
        return tuple(filter(None, (*(region.grammar for region in self.regions), self.required, self.cut)))

    @classmethod
    def read(cls, text: str) -> "Regions":
        """Parse regions from JSON. Raises RequestError."""
        given = _parsed(text, "regions")
        try:
            regions = tuple(Region(**region) for region in given.pop("regions", ()))
            found = cls(regions, **given)
        except (TypeError, KeyError, AttributeError) as error:
            raise RequestError(f"regions cannot be read: {error}") from None
        if not all(region.mark and region.grammar for region in regions) or not (regions or found.required):
            raise RequestError("regions must have marks and grammars")
        return found if found.thought is None else replace(found, thought=(*found.thought,))

    def constraint(self) -> Constraint:
        """Return the constraint of an answer with these regions."""
        return Constraint("regions", _written(asdict(self)))


# In a message of llguidance: a line below the expression with carets under the error, then the reason.
_REGEX_ERROR = re.compile(r"regex parse error:\n {4}.*\n {4}( *)\^+\nerror: (.*)")


def _check_regex(regex: str) -> None:
    """Raise RequestError, with the position and the reason, if a regular expression does not compile."""
    from llguidance import LLMatcher

    shown = short_repr(regex)
    if (len(regex) - len(regex.rstrip("\\"))) % 2:  # llguidance drops it without an error
        raise RequestError(f"invalid regex {shown}: incomplete escape at character {len(regex)}")
    failed, messages = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_regex(regex))
    if not failed:
        return
    found = _REGEX_ERROR.search(messages[0])
    if found is None:
        raise RequestError(f"invalid regex {shown}: {' '.join(messages[0].split())[:200]}")
    # llguidance escapes slashes and control characters: find the prefix that has this length with escapes.
    at = bisect_left(range(len(regex)), len(found[1]), key=lambda end: _escaped_length(regex[:end]))
    raise RequestError(f"invalid regex {shown}: {found[2]} at character {at + 1}, {short_repr(regex[at:])}")


def _escaped_length(regex: str) -> int:
    from llguidance import LLMatcher

    grammar = json.loads(LLMatcher.grammar_from_regex(regex))["grammars"][0]["lark_grammar"]
    return len(grammar.removeprefix("start: /").removesuffix("/"))


def _written(value: Any) -> str:
    """Serialize a schema or a list as JSON."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"a format cannot be written as JSON: {error}") from None


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise RequestError(f"{what} is nested too deeply") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise RequestError(f"{what} must be JSON, but {where} is not: {error.msg}") from None
