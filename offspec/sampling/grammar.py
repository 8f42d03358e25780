"""Grammars of output constraints, and matchers that follow them over a vocabulary, both by llguidance.

Reasons for llguidance instead of xgrammar: llguidance computes the mask of a state when the state is reached,
so a schema is usable after a millisecond, while xgrammar checks the vocabulary against the parts of a grammar
beforehand and caches the result. Its matcher is copied in one or two microseconds, so each node of a tree can
have its own. If the text is forced, its mask leaves exactly the token that the tokenizer would write. It
refuses JSON Schema keywords that it cannot enforce, by name.
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

# The default layout of `json.dumps`. Flexible whitespace would leave fewer forced tokens, and a small model
# that begins to indent may never stop. A schema can override this with its own "x-guidance".
LAYOUT: "JsonCompileOptions" = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def check_format(format: Constraint) -> None:
    """Raise RequestError, with the reason, for a format that cannot be enforced; needs no model."""
    from llguidance import LLMatcher

    if format.kind == "regions":
        return  # created by offspec itself
    failed, messages = LLMatcher.validate_grammar_with_warnings(_grammar(format))
    if failed:
        raise _refused(format, messages[0])


def matcher_of(format: Constraint, tokens: "LLTokenizer") -> "LLMatcher":
    """Return a matcher at the beginning of a format. Raises RequestError, with the reason, if that fails."""
    return _matcher(_grammar(format), tokens, format)


class Grammars:
    """Cache of llguidance grammars, compiled for one vocabulary. Thread-safe.

    tokens: tokenizer with the vocabulary.
    """

    def __init__(self, tokens: "LLTokenizer") -> None:
        self.tokens = tokens
        self.compiled = lru_cache(maxsize=64)(self._compile)

    def matcher(self, grammar: str) -> "LLMatcher":
        """Return a matcher at the beginning of a grammar. Raises RequestError for an invalid grammar."""
        return self.compiled(grammar).deep_copy()

    def _compile(self, grammar: str) -> "LLMatcher":
        format = Constraint("grammar", grammar)
        matcher = _matcher(grammar, self.tokens, format)
        trial = matcher.deep_copy()
        trial.compute_bitmask()  # some grammars only fail here
        if trial.is_error():
            raise _refused(format, trial.get_error())
        return matcher


def _matcher(grammar: str, tokens: "LLTokenizer", format: Constraint) -> "LLMatcher":
    from llguidance import LLMatcher

    matcher = LLMatcher(tokens, grammar, log_level=0)
    if matcher.is_error():
        raise _refused(format, matcher.get_error())
    return matcher


def with_preamble(format: Constraint, before: str) -> str:
    """Return the grammar of a format preceded by `before`, given in Lark. Raises RequestError."""
    grammar = _grammar(format)
    inner = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {"lark_grammar": grammar}
    outer = {"name": "outer", "lark_grammar": f"start: {before} @inner"}
    return json.dumps({"grammars": [outer, {**inner, "name": "inner"}]})


def _grammar(format: Constraint) -> str:
    """Return the llguidance grammar of a format. Raises RequestError."""
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
    text = " ".join(reason.split("<state>")[0].split())[:300]
    return RequestError(f"the {format.kind.replace('_', ' ')} cannot be enforced: {text}")


def tokens_extending(text: str, tokens: "LLTokenizer") -> list[int]:
    """Return the tokens that may begin a text longer than `text` that starts with it."""
    from llguidance import LLMatcher

    grammar = f"start: ALL\nALL: {json.dumps(text, ensure_ascii=False)} /(.|\\n)+/"
    mask = np.frombuffer(LLMatcher(tokens, grammar, log_level=0).compute_bitmask(), np.uint8)
    return np.flatnonzero(np.unpackbits(mask, count=tokens.vocab_size, bitorder="little")).tolist()
