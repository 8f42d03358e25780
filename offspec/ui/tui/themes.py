"""A dark and a light theme, and which of them a terminal wants.

OFFSPEC_THEME says it: "dark", "light". The program sets it to the user's default, if there is one. Else
COLORFGBG does, which several terminals set to the numbers of their text and background colours. Else it is
dark.
"""

from collections.abc import Mapping, MutableMapping
from os import environ
from typing import Any

from textual.app import App
from textual.theme import Theme

from offspec.core.errors import OffspecError
from offspec.core.user_config import UserConfig

DARK = Theme(
    name="offspec-dark",
    primary="#6cb6ff",
    secondary="#a5b4fc",
    accent="#e3b341",
    success="#57d68d",
    warning="#f0b35a",
    error="#ff7b72",
    foreground="#dfe5ec",
    background="#0f141a",
    surface="#161c24",
    panel="#1f2731",
    dark=True,
)
LIGHT = Theme(
    name="offspec-light",
    primary="#0b5cad",
    secondary="#4f46a5",
    accent="#8a5a00",
    success="#11703c",
    warning="#8a4b00",
    error="#b3261e",
    foreground="#1c2128",
    background="#fbfbf9",
    surface="#f2f2ee",
    panel="#e6e6e0",
    dark=False,
)

THEMES = {"dark": DARK, "light": LIGHT}

# The numbers in COLORFGBG are of the sixteen colours; of the backgrounds these are bright.
_BRIGHT = ("7", "15")


def register(app: App[Any], variables: Mapping[str, str] = environ) -> str:
    """Give the app both themes, and put on the one that the terminal's environment asks for.

    What is wrong with OFFSPEC_THEME, "" where nothing is.
    """
    for theme in THEMES.values():
        app.register_theme(theme)
    named = variables.get("OFFSPEC_THEME", "").strip()
    bright = variables.get("COLORFGBG", "").rpartition(";")[2] in _BRIGHT
    app.theme = THEMES.get(named.lower(), LIGHT if bright else DARK).name
    if not named or named.lower() in THEMES:
        return ""
    return f"there is no theme {named!r}, as OFFSPEC_THEME has it; there are {' and '.join(THEMES)}"


def remember(name: str, variables: MutableMapping[str, str] = environ) -> str:
    """Make "dark" or "light" the user's default; return a line that says so, or why that is not possible."""
    try:
        config = UserConfig()
        default = str(config.values.get("theme", ""))
        config.set("theme", name)
    except OffspecError as error:
        return f"the {name} theme is not remembered: {error}"
    if variables.get("OFFSPEC_THEME", default) != default:
        return f"OFFSPEC_THEME is set, and decides the next time; without it, {name} is remembered"
    variables["OFFSPEC_THEME"] = name
    return f"the {name} theme is remembered in {config.file}"
