"""What a whole answer must look like: a JSON schema, a regular expression, a choice of texts, a grammar."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offspec.core.errors import RequestError
from offspec.core.values import shown

KINDS = ("json_schema", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True)
class Constraint:
    """The format of an answer, which then has it from its first token to its last.

    Args:
        kind: "json_schema", "json_object" (any JSON object), "regex", "choice" (one of several texts) or
            "grammar" (Lark, or the EBNF of llama.cpp).
        text: The schema as JSON, the regular expression, the texts as a JSON list, or the grammar. A schema
            and a list may also be given as Python has them. Empty for "json_object".

    Raises:
        RequestError: An unknown kind, or a text that is not what its kind needs. Whether a schema, an
            expression or a grammar can be followed is found out when it is used.
    """

    kind: str
    text: str = ""

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
        _check_unicode(self.text)
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
            case "json_object":
                if self.text:
                    raise RequestError(
                        "json_object is any JSON object and takes no text; did you mean json_schema?"
                    )
            case _:
                if not self.text:
                    raise RequestError(f"a {self.kind} must not be empty")


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


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError("a format must be valid Unicode text") from None
