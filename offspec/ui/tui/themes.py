"""Dark and light theme, and the choice between them.

OFFSPEC_THEME, "dark" or "light", decides; the program sets it to the user's default, if there is one.
Otherwise COLORFGBG decides, which several terminals set to the numbers of their text and background colours.
The fallback is dark.
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

# Bright background colours among the 16 colours that COLORFGBG numbers.
_BRIGHT = ("7", "15")


def register(app: App[Any], variables: Mapping[str, str] = environ) -> str:
    """Register both themes and apply the one that the environment selects.

    Return an error message about OFFSPEC_THEME, or "".
    """
    for theme in THEMES.values():
        app.register_theme(theme)
    named = variables.get("OFFSPEC_THEME", "").strip()
    bright = variables.get("COLORFGBG", "").rpartition(";")[2] in _BRIGHT
    app.theme = THEMES.get(named.lower(), LIGHT if bright else DARK).name
    if not named or named.lower() in THEMES:
        return ""
    return f"unknown theme {named!r} in OFFSPEC_THEME; valid themes are {' and '.join(THEMES)}"


def save_default(name: str, variables: MutableMapping[str, str] = environ) -> str:
    """Make "dark" or "light" the user's default. Return a line about the result."""
    try:
        config = UserConfig()
        default = str(config.values.get("theme", ""))
        config.set("theme", name)
    except OffspecError as error:
        return f"the {name} theme could not be saved: {error}"
    if variables.get("OFFSPEC_THEME", default) != default:
        return f"{name} theme saved, but OFFSPEC_THEME is set and overrides it next time"
    variables["OFFSPEC_THEME"] = name
    return f"{name} theme saved in {config.file}"
