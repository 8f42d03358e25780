"""Sampling parameters of `/set`: names, meanings, and syntax of values."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, cast

from offspec.core.config import PARAMS, SamplingParams
from offspec.core.errors import RequestError
from offspec.core.setting import settings_of

_DECLARED = settings_of(SamplingParams)
_SETTINGS = {name: _DECLARED[name] for name in PARAMS if _DECLARED[name].chat}
_WORDS = {  # meanings that differ from the help of the options
    "top_k": "keep this number of most likely tokens; 0 disables it",
    "repetition_penalty": "penalty for repeating tokens of the conversation, if above 1",
    "seed": "the same seed gives the same answer; random chooses a new one each time",
    "max_tokens": "maximum number of tokens of an answer",
    "stop": "text that ends an answer and is not part of it",
    "bad_words": "text that answers may not contain",
    "no_repeat_ngram_size": "forbid repeating this number of consecutive tokens; 0 disables it",
    "min_tokens": "minimum number of tokens before an answer may end",
}
MEANINGS: Mapping[str, str] = {
    name: _WORDS.get(name, f"{setting.help[:1].lower()}{setting.help[1:].rstrip('.')}")
    for name, setting in _SETTINGS.items()
}
_TEXTS = [name for name, setting in _SETTINGS.items() if setting.kind == tuple[str, ...]]


def run_set(
    params: SamplingParams, argument: str, defaults: SamplingParams, *, loading: bool = False
) -> tuple[SamplingParams, str]:
    """Apply `/set ARGUMENT`. Return the new parameters and a message in Markdown. Raises RequestError.

    loading: whether the model is still loading, so that its defaults are unknown.
    """
    unknown = " Other parameters get the model's defaults once it is loaded." if loading else ""
    if not argument:
        return params, f"{settings_table(params)}\n\n`/set temperature=0.7` changes one.{unknown}"
    if len(argument.split()) == 1 and "=" not in argument and argument != "default":
        name = resolve_name(argument)
        return params, f"`{name}` is `{format_value(params, name)}`: {MEANINGS[name]}.{unknown}"
    after = defaults if argument == "default" else apply_changes(params, argument, defaults)
    written = {name for name, _ in _pairs(argument)} if loading and argument != "default" else set[str]()
    news = [
        f"`{name}` is `{format_value(after, name)}`"
        for name in MEANINGS
        if getattr(params, name) != getattr(after, name) or name in written
    ]
    if not news:
        return after, "No change: already set."
    return after, f"From the next answer on, {', '.join(news)}."


def apply_changes(params: SamplingParams, text: str, defaults: SamplingParams) -> SamplingParams:
    """Apply `name=value …` or `name value` to parameters. defaults: values that `default` stands for.

    Raises RequestError with the valid names or the range of a value.
    """
    values: dict[str, Any] = {}
    for name, written in _pairs(text):
        value = getattr(defaults, name) if written == "default" else _read(name, written)
        if name in _TEXTS and written not in ("default", "none"):
            value = (*values.get(name, ()), value)
        values[name] = value
    return replace(params, **values)


def read_seed(text: str) -> int | None:
    """Parse a seed; None for `random`. Raises RequestError."""
    return cast("int | None", _read("seed", text))


def format_value(params: SamplingParams, name: str) -> str:
    """Return the value of a parameter in the syntax of `/set`."""
    value = getattr(params, name)
    if name == "seed":
        return "random" if value is None else str(value)
    if name in _TEXTS:
        return " ".join(repr(text) for text in value) or "none"
    if name == "ignore_eos":
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def settings_table(params: SamplingParams) -> str:
    """Return a table of all parameters in Markdown."""
    rows = [f"| `{name}` | `{format_value(params, name)}` | {means} |" for name, means in MEANINGS.items()]
    return "\n".join(("| name | value | meaning |", "|---|---|---|", *rows))


def choices_of(name: str) -> list[tuple[str, str]]:
    """Return the values of a parameter that are words, with their meanings."""
    words = [("default", "the value that the chat started with")]
    if name == "seed":
        words.append(("random", "a new seed for every answer"))
    elif name in _TEXTS:
        words.append(("none", "no text"))
    elif name == "ignore_eos":
        words += [("on", "continue after the token"), ("off", "end at the token")]
    return words


def parameter_name(name: str) -> str | None:
    """Return the name of a parameter that may be written with hyphens and capitals; None if unknown."""
    wanted = name.lower().replace("-", "_")
    return wanted if wanted in MEANINGS else None


def resolve_name(name: str) -> str:
    """Normalize the name of a parameter like `parameter_name`. Raises RequestError with the nearest name."""
    known = parameter_name(name)
    if known is not None:
        return known
    near = get_close_matches(name.lower().replace("-", "_"), MEANINGS, n=1, cutoff=0.5)
    meant = f"did you mean {near[0]}?" if near else f"valid names are {', '.join(MEANINGS)}"
    raise RequestError(f"unknown parameter {name!r}; {meant}")


def _pairs(text: str) -> list[tuple[str, str]]:
    """Split an argument into names and values. Raises RequestError."""
    try:
        words = list(_words(text))
    except ValueError:
        raise RequestError("a quote is not closed; close it, or omit both quotes") from None
    if len(words) == 2 and not any("=" in word for word in words):
        words = ["=".join(words)]
    pairs = []
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not value:
            raise RequestError(f"no value given; write {resolve_name(name)}=value, without spaces around =")
        pairs.append((resolve_name(name), value))
    return pairs


def _words(text: str) -> shlex.shlex:
    """Split words like a shell, except that a backslash is literal: `stop=\\n` is a new line, not an n."""
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.escape, lexer.commenters = True, "", ""
    return lexer


def _read(name: str, text: str) -> Any:
    wanted, read = _READERS[_SETTINGS[name].kind]
    try:
        return read(text)
    except (ValueError, KeyError):
        raise RequestError(f"{name} must be {wanted}, not {text!r}") from None


def _seed(text: str) -> int | None:
    return None if text.lower() in ("random", "none") else int(text)


def _text(text: str) -> str | tuple[str, ...]:
    return () if text == "none" else text.replace("\\n", "\n").replace("\\t", "\t")


_SWITCH = dict.fromkeys(("on", "true", "yes", "1"), True) | dict.fromkeys(("off", "false", "no", "0"), False)
_READERS: Mapping[Any, tuple[str, Callable[[str], Any]]] = {
    float: ("a number", float),
    int: ("a whole number", lambda text: int(text.replace(",", ""))),
    bool: ("on or off", lambda text: _SWITCH[text.lower()]),
    tuple[str, ...]: ("a text", _text),
    int | None: ("a whole number or random", _seed),
}
