"""The user's defaults for options. An option on the command line takes precedence."""

import os
from collections.abc import Mapping
from typing import Any

import typer

from offspec.core.config import OPTIONS
from offspec.core.errors import RequestError
from offspec.core.setting import PLANS
from offspec.core.user_config import UserConfig, Value
from offspec.ui.cli.value_errors import reworded

THEMES = ("dark", "light")
# Options by name without dashes. The options of `offspec chat` decide which values are valid.
KEYS = (*(setting.option for setting in OPTIONS.values() if setting.saved), "theme", "notify")
_OF_THIS_MACHINE = ("memory", "vram", "device")


def check(group: Any, key: str, value: Value) -> None:
    """Raise RequestError for an unknown key, or for a value that its option rejects.

    group: the program's commands.
    """
    if key not in KEYS:
        raise RequestError(f"unknown key {key!r}; valid keys are {', '.join(KEYS)}")
    if key == "theme":
        if value not in THEMES:
            raise RequestError(f"theme must be {' or '.join(THEMES)}, not {value!r}")
        return
    chat = group.commands["chat"]
    (option,) = (option for option in chat.params if option.name == key.replace("-", "_"))
    try:
        option.process_value(typer.Context(chat), value)
    except (typer.BadParameter, RequestError) as error:
        why = reworded(error) if isinstance(error, typer.BadParameter) else str(error)
        raise RequestError(f"invalid value {value!r} for {key}: {why}") from error


def default_map(group: Any, words: list[str]) -> Mapping[str, Mapping[str, Any]]:
    """Return click's defaults of omitted options, by command and option.

    Raises RequestError for a file with an unknown key or an invalid value.

    words: words after the command.
    """
    config = UserConfig()
    for key, value in config.values.items():
        try:
            check(group, key, value)
        except RequestError as error:
            raise config.wrong(key, str(error)) from error
    if "theme" in config.values:
        os.environ.setdefault("OFFSPEC_THEME", str(config.values["theme"]))
    dropped = ("theme", "temperature") if "--greedy" in words else ("theme",)
    values = {key.replace("-", "_"): value for key, value in config.values.items() if key not in dropped}
    # A plan for another machine ignores defaults that describe this one.
    elsewhere = any(word.partition("=")[0] == "--hardware" for word in words)
    planned = {key: value for key, value in values.items() if not (elsewhere and key in _OF_THIS_MACHINE)}
    return {name: planned if name == "plan" else values for name in PLANS}
