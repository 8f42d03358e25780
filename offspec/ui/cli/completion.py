"""Shell completions of option and argument values, each with its meaning.

Typer calls these functions while a line is typed: each imports only what it needs, reads no model, and never
raises.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import typer

from offspec.core.errors import OffspecError

Offered = list[tuple[str, str]]

_PLAIN = re.compile(r"[\w./-]+")  # characters that need no quotes in a shell


def models(incomplete: str) -> Offered:
    """Complete models on this machine, folders, and files of weights."""
    from offspec.checkpoint.open import local_names
    from offspec.ui.path_completion import MODELS, complete_path

    return _matching(incomplete, [*local_names(), *complete_path(incomplete, MODELS)])


def cached_models(incomplete: str) -> Offered:
    """Complete the names that `offspec models` lists."""
    from offspec.checkpoint.cached_models import cached_models

    with suppress(OffspecError):
        return _matching(incomplete, [(model.name, model.kind) for model in cached_models()])
    return []


def draft_sources(incomplete: str) -> Offered:
    """Complete a comma-separated list of draft sources."""
    from offspec.ui.chat.completion import complete_drafts

    return list(complete_drafts(incomplete))


def hardware_names(incomplete: str) -> Offered:
    """Complete hardware presets and JSON files."""
    from offspec.ui.path_completion import complete_path
    from offspec_planners.hardware_rates import preset_names

    presets = [(name, "a preset of offspec") for name in preset_names()]
    return _matching(incomplete, [*presets, *complete_path(incomplete, (".json",))])


def hardware_names_or_list(incomplete: str) -> Offered:
    """Complete hardware presets, JSON files, and the word `list`."""
    return [*_matching(incomplete, [("list", "all presets")]), *hardware_names(incomplete)]


def sessions(incomplete: str) -> Offered:
    """Complete conversations by title, or by id if the title needs quotes in a shell; and files."""
    from offspec.chat.archive import SessionArchive
    from offspec.ui.path_completion import complete_explicit_path

    saved = [
        (entry.title if _PLAIN.fullmatch(entry.title) else entry.id, f"{entry.title}, {entry.model}")
        for entry in SessionArchive().list()
    ]
    return _matching(incomplete, [*saved, *complete_explicit_path(incomplete, (".json",))])


def config_keys(incomplete: str) -> Offered:
    """Complete all keys."""
    from offspec.ui.cli.defaults import KEYS

    return _matching(incomplete, [(key, "") for key in KEYS])


def set_config_keys(incomplete: str) -> Offered:
    """Complete the keys that have a value."""
    from offspec.core.user_config import UserConfig

    with suppress(OffspecError):
        return _matching(incomplete, [(key, str(value)) for key, value in UserConfig().values.items()])
    return []


def config_values(ctx: typer.Context, incomplete: str) -> Offered:
    """Complete the values of the given key, as its option does."""
    from offspec.ui.cli.defaults import THEMES

    key = str(ctx.params.get("key", ""))
    if key == "theme":
        return _matching(incomplete, [(theme, "") for theme in THEMES])
    group: Any = ctx.find_root().command
    options = [option for option in group.commands["chat"].params if option.name == key.replace("-", "_")]
    return [
        (item.value, item.help or "") for option in options for item in option.shell_complete(ctx, incomplete)
    ]


def _matching(incomplete: str, offered: Sequence[tuple[str, str]] | Iterator[tuple[str, str]]) -> Offered:
    return [(value, meaning) for value, meaning in offered if value.startswith(incomplete)]
