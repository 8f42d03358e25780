"""What `/set` knows: the sampling parameters by name, what each means, and how its value is written."""

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
_WORDS = {  # where a chat has other words than the help
    "top_k": "sample from this number of likeliest tokens; 0 is off",
    "repetition_penalty": "values above 1 make tokens of the conversation less likely to repeat",
    "seed": "the same seed gives the same answer; random chooses a new one each time",
    "max_tokens": "end an answer after this number of tokens",
    "stop": "end an answer before this text",
    "bad_words": "never say this",
    "no_repeat_ngram_size": "never say the same number of tokens in a row twice; 0 is off",
    "min_tokens": "an answer cannot end before it has so many tokens",
}
MEANINGS: Mapping[str, str] = {
    name: _WORDS.get(name, f"{setting.help[:1].lower()}{setting.help[1:].rstrip('.')}")
    for name, setting in _SETTINGS.items()
}
_TEXTS = [name for name, setting in _SETTINGS.items() if setting.kind == tuple[str, ...]]


def run_set(
    params: SamplingParams, argument: str, defaults: SamplingParams, *, loading: bool = False
) -> tuple[SamplingParams, str]:
    """What `/set ARGUMENT` makes of the parameters, and what it says, in Markdown. Raises RequestError.

    loading: the model is not loaded yet, and may have other defaults.
    """
    unknown = " Parameters that are not set take the model's defaults when it is loaded." if loading else ""
    if not argument:
        return params, f"{table(params)}\n\n`/set temperature=0.7` changes one.{unknown}"
    if len(argument.split()) == 1 and "=" not in argument and argument != "default":
        name = known(argument)
        return params, f"`{name}` is `{shown(params, name)}`: {MEANINGS[name]}.{unknown}"
    after = defaults if argument == "default" else changed(params, argument, defaults)
    written = {name for name, _ in _pairs(argument)} if loading and argument != "default" else set[str]()
    news = [
        f"`{name}` is `{shown(after, name)}`"
        for name in MEANINGS
        if getattr(params, name) != getattr(after, name) or name in written
    ]
    if not news:
        return after, "Nothing changes: it was set so already."
    return after, f"From the next answer on {', '.join(news)}."


def changed(params: SamplingParams, text: str, defaults: SamplingParams) -> SamplingParams:
    """params after `name=value …`, or `name value`. defaults: what the value `default` stands for.

    Raises RequestError, which names what can be set, or the range of a value.
    """
    values: dict[str, Any] = {}
    for name, written in _pairs(text):
        value = getattr(defaults, name) if written == "default" else _read(name, written)
        if name in _TEXTS and written not in ("default", "none"):
            value = (*values.get(name, ()), value)
        values[name] = value
    return replace(params, **values)


def read_seed(text: str) -> int | None:
    """A seed, or None for `random`. Raises RequestError."""
    return cast("int | None", _read("seed", text))


def shown(params: SamplingParams, name: str) -> str:
    """A value as it would be written."""
    value = getattr(params, name)
    if name == "seed":
        return "random" if value is None else str(value)
    if name in _TEXTS:
        return " ".join(repr(text) for text in value) or "none"
    if name == "ignore_eos":
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def table(params: SamplingParams) -> str:
    """All that can be set, in Markdown."""
    rows = [f"| `{name}` | `{shown(params, name)}` | {means} |" for name, means in MEANINGS.items()]
    return "\n".join(("| name | value | meaning |", "|---|---|---|", *rows))


def values_of(name: str) -> list[tuple[str, str]]:
    """Values that are words, each with what it means."""
    words = [("default", "what the chat began with")]
    if name == "seed":
        words.append(("random", "a new seed for every answer"))
    elif name in _TEXTS:
        words.append(("none", "no text"))
    elif name == "ignore_eos":
        words += [("on", "continue after it"), ("off", "end with it")]
    return words


def known(name: str) -> str:
    """The name of a setting, hyphens and capitals forgiven. Raises RequestError with the nearest one."""
    wanted = name.lower().replace("-", "_")
    if wanted in MEANINGS:
        return wanted
    near = get_close_matches(wanted, MEANINGS, n=1, cutoff=0.5)
    meant = f"the nearest is {near[0]}" if near else f"there are {', '.join(MEANINGS)}"
    raise RequestError(f"{name!r} cannot be set; {meant}")


def _pairs(text: str) -> list[tuple[str, str]]:
    """Names and values as written. Raises RequestError."""
    try:
        words = list(_words(text))
    except ValueError:
        raise RequestError("a quote is left open; close it, or leave both out") from None
    if len(words) == 2 and not any("=" in word for word in words):
        words = ["=".join(words)]
    pairs = []
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not value:
            raise RequestError(f"write {known(name)}=value, with no space around the sign")
        pairs.append((known(name), value))
    return pairs


def _words(text: str) -> shlex.shlex:
    """Words as a shell has them, but that a backslash is one: `stop=\\n` is a new line, not an n."""
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.escape, lexer.commenters = True, "", ""
    return lexer


def _read(name: str, text: str) -> Any:
    wanted, read = _READERS[_SETTINGS[name].kind]
    try:
        return read(text)
    except (ValueError, KeyError):
        raise RequestError(f"{name} is {wanted}, not {text!r}") from None


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
