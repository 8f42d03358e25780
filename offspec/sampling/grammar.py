"""What llguidance makes of a format: a grammar, and a matcher that follows it over a vocabulary.

llguidance rather than xgrammar: it computes the mask of a state when that state is reached, so a schema can
be followed a millisecond after it was sent, while xgrammar checks the vocabulary against the parts of a
grammar beforehand and keeps what it found; its matcher is copied in a microsecond or two, so that each node
of a tree has one; and where the text is forced its mask leaves the one token that the tokenizer would write.
What of JSON Schema it cannot enforce it refuses, by key.
"""

import json
import re
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from offspec.core.constraint import Constraint
from offspec.core.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

# As `json.dumps` writes by default. Free whitespace would leave fewer forced tokens, and a small model that
# begins to indent may never end. A schema can choose otherwise by its own "x-guidance".
LAYOUT: "JsonCompileOptions" = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def check_format(format: Constraint) -> None:
    """Raises RequestError, with the reason, for a format that cannot be followed; needs no model."""
    from llguidance import LLMatcher

    if format.kind == "regions":
        return  # made by offspec itself
    failed, messages = LLMatcher.validate_grammar_with_warnings(_grammar(format))
    if failed:
        raise _refused(format, messages[0])


def matcher_of(format: Constraint, tokens: "LLTokenizer") -> "LLMatcher":
    """A matcher at the beginning of a format. Raises RequestError, with the reason, if it cannot be one."""
    return _matcher(_grammar(format), tokens, format)


class Grammars:
    """Grammars in llguidance's words, compiled for one vocabulary; the latest are kept. From any thread.

    tokens: The vocabulary.
    """

    def __init__(self, tokens: "LLTokenizer") -> None:
        self.tokens = tokens
        self.compiled = lru_cache(maxsize=64)(self._compile)

    def matcher(self, grammar: str) -> "LLMatcher":
        """A matcher at the beginning of a grammar. Raises RequestError if there can be none."""
        return self.compiled(grammar).deep_copy()

    def _compile(self, grammar: str) -> "LLMatcher":
        format = Constraint("grammar", grammar)
        matcher = _matcher(grammar, self.tokens, format)
        trial = matcher.deep_copy()
        trial.compute_bitmask()  # some grammars fail only then
        if trial.is_error():
            raise _refused(format, trial.get_error())
        return matcher


def _matcher(grammar: str, tokens: "LLTokenizer", format: Constraint) -> "LLMatcher":
    from llguidance import LLMatcher

    matcher = LLMatcher(tokens, grammar, log_level=0)
    if matcher.is_error():
        raise _refused(format, matcher.get_error())
    return matcher


def preceded(format: Constraint, before: str) -> str:
    """The grammar of a format after something else, given in Lark. Raises RequestError."""
    grammar = _grammar(format)
    inner = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {"lark_grammar": grammar}
    outer = {"name": "outer", "lark_grammar": f"start: {before} @inner"}
    return json.dumps({"grammars": [outer, {**inner, "name": "inner"}]})


def _grammar(format: Constraint) -> str:
    """A format in llguidance's own words. Raises RequestError."""
    from llguidance import LLMatcher, grammar_from

    try:
        match format.kind:
            case "json_schema":
                return LLMatcher.grammar_from_json_schema(format.text, defaults=LAYOUT)
            case "json_object":
                return LLMatcher.grammar_from_json_schema('{"type": "object"}', defaults=LAYOUT)
            case "regex":
                return LLMatcher.grammar_from_regex(format.text)
            case "choice":
                return LLMatcher.grammar_from_regex("|".join(map(re.escape, json.loads(format.text))))
            case _:
                return grammar_from("ebnf", format.text)
    except ValueError as error:
        raise _refused(format, str(error)) from None


def _refused(format: Constraint, reason: str) -> RequestError:
    said = " ".join(reason.split("<state>")[0].split())[:300]
    return RequestError(f"the {format.kind.replace('_', ' ')} cannot be followed: {said}")


def tokens_beyond(text: str, tokens: "LLTokenizer") -> list[int]:
    """The tokens with which a text may begin that goes on after `text`; some of them only begin it."""
    from llguidance import LLMatcher

    grammar = f"start: ALL\nALL: {json.dumps(text, ensure_ascii=False)} /(.|\\n)+/"
    mask = np.frombuffer(LLMatcher(tokens, grammar, log_level=0).compute_bitmask(), np.uint8)
    return np.flatnonzero(np.unpackbits(mask, count=tokens.vocab_size, bitorder="little")).tolist()
