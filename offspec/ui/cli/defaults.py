"""Defaults of the user in the place of those of options: an option on the command line wins."""

import os
from collections.abc import Mapping
from typing import Any

import typer

from offspec.core.config import OPTIONS
from offspec.core.errors import RequestError
from offspec.core.setting import PLANS
from offspec.core.user_config import UserConfig, Value

THEMES = ("dark", "light")
# Options by their names, less the dashes; those that a chat has decide what is a value.
KEYS = (*(setting.option for setting in OPTIONS.values() if setting.saved), "theme", "notify")
_OF_THIS_MACHINE = ("memory", "vram", "device")


def check(group: Any, key: str, value: Value) -> None:
    """Raise RequestError for a key that is none, or a value that its option would not take.

    group: the program's commands.
    """
    if key not in KEYS:
        raise RequestError(f"there is no default {key!r}; there are {', '.join(KEYS)}")
    if key == "theme":
        if value not in THEMES:
            raise RequestError(f"theme must be {' or '.join(THEMES)}, not {value!r}")
        return
    chat = group.commands["chat"]
    (option,) = (option for option in chat.params if option.name == key.replace("-", "_"))
    try:
        option.process_value(typer.Context(chat), value)
    except (typer.BadParameter, RequestError) as error:
        why = error.message if isinstance(error, typer.BadParameter) else str(error)
        raise RequestError(f"{key} cannot be {value!r}: {why}") from error


def default_map(group: Any, words: list[str]) -> Mapping[str, Mapping[str, Any]]:
    """What click takes where an option is not given, by command and option.

    words: behind the command. Raises RequestError for a file with a wrong key or value.
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
    # A plan for a machine that is elsewhere goes by that machine.
    elsewhere = any(word.partition("=")[0] == "--hardware" for word in words)
    planned = {key: value for key, value in values.items() if not (elsewhere and key in _OF_THIS_MACHINE)}
    return {name: planned if name == "plan" else values for name in PLANS}
