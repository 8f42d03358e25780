"""What a whole answer must look like: a JSON schema, a regular expression, a choice of texts, a grammar."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from offspec.core.errors import RequestError
from offspec.core.json_schema import closed_schema
from offspec.core.values import is_unicode, shown

KINDS = ("json_schema", "json_object", "regex", "choice", "grammar", "regions")


@dataclass(frozen=True, slots=True)
class Constraint:
    """The format of an answer, which then has it from its first token to its last.

    Args:
        kind: "json_schema", "json_object" (any JSON object), "regex", "choice" (one of several texts),
            "grammar" (Lark, or the EBNF of llama.cpp) or "regions" (parts of an answer alone have a format).
        text: The schema as JSON, the regular expression, the texts as a JSON list, the grammar, or the fields
            of `Regions` as JSON. A schema, a list and fields may also be given as Python has them. Empty for
            "json_object".

    Raises:
        RequestError: An unknown kind, or a text that is not what its kind needs. Whether a schema, an
            expression or a grammar can be followed is found out when it is used.
    """

    kind: str
    text: str = ""

    @property
    def closed(self) -> "Constraint":
        """The format, objects of its schema closed; see `closed_schema`."""
        if self.kind != "json_schema":
            return self
        return replace(self, text=_written(closed_schema(json.loads(self.text))))

    @classmethod
    def of(cls, given: object) -> "Constraint | None":
        """A format, given as one or as the mapping of its fields; None for none. Raises RequestError."""
        if given is None or isinstance(given, Constraint):
            return given
        if not isinstance(given, Mapping) or not {"kind"} <= given.keys() <= {"kind", "text"}:
            raise RequestError(f"format must be a Constraint, or its kind and text, not {shown(given)}")
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


@dataclass(frozen=True, slots=True)
class Region:
    """A part of an answer that has a format: it begins behind a mark, and ends where its grammar ends.

    Args:
        mark: The text that opens it.
        grammar: What follows the mark, in Lark.
        at_start: The mark opens a region only at the beginning of the answer.
    """

    mark: str
    grammar: str
    at_start: bool = False


@dataclass(frozen=True, slots=True)
class Regions:
    """Where in an answer formats begin. Reasoning, and text outside of regions, is free.

    Args:
        regions: Those that may come.
        thought: The marks that begin and end reasoning. None: there is none.
        thinking: The answer begins within reasoning.
        required: The answer after its reasoning, in Lark; "": anything.
        thought_tokens: Most tokens of reasoning before what is required. None: any number.
        cut: The end of reasoning and what is required, in Lark: for reasoning of so many tokens.
    """

    regions: tuple[Region, ...] = ()
    thought: tuple[str, str] | None = None
    thinking: bool = False
    required: str = ""
    thought_tokens: int | None = None
    cut: str = ""

    @property
    def grammars(self) -> tuple[str, ...]:
        """All grammars that may be followed."""
        return tuple(filter(None, (*(region.grammar for region in self.regions), self.required, self.cut)))

    @classmethod
    def read(cls, text: str) -> "Regions":
        """Regions from JSON. Raises RequestError."""
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
        """The format of an answer with these regions."""
        return Constraint("regions", _written(asdict(self)))


def _written(value: Any) -> str:
    """A schema or a list as JSON."""
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
        raise RequestError(f"{what} must be JSON, and {where} is not: {error.msg}") from None
