"""What the shell offers for values of options and arguments, each with its meaning.

Typer calls these while a line is typed: each imports what it needs, reads no model, and raises nothing.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import typer

from offspec.core.errors import OffspecError

Offered = list[tuple[str, str]]

_PLAIN = re.compile(r"[\w./-]+")  # what a shell takes as it is


def models(incomplete: str) -> Offered:
    """Models on this machine, folders, and files of weights."""
    from offspec.checkpoint.open import local_names
    from offspec.ui.path_completion import MODELS, complete_path

    return _fitting(incomplete, [*local_names(), *complete_path(incomplete, MODELS)])


def cached_models(incomplete: str) -> Offered:
    """What `offspec models` lists."""
    from offspec.checkpoint.cached_models import cached_models

    with suppress(OffspecError):
        return _fitting(incomplete, [(model.name, model.kind) for model in cached_models()])
    return []


def drafts(incomplete: str) -> Offered:
    """Draft sources, with commas between them."""
    from offspec.ui.chat.completion import complete_drafts

    return list(complete_drafts(incomplete))


def machines(incomplete: str) -> Offered:
    """Presets of hardware, and JSON files."""
    from offspec.ui.path_completion import complete_path
    from offspec_planners.hardware_rates import preset_names

    presets = [(name, "a machine that comes with offspec") for name in preset_names()]
    return _fitting(incomplete, [*presets, *complete_path(incomplete, (".json",))])


def machines_or_list(incomplete: str) -> Offered:
    """As `machines`, with the word that lists them."""
    return [*_fitting(incomplete, [("list", "the names of all presets")]), *machines(incomplete)]


def sessions(incomplete: str) -> Offered:
    """Conversations by their title, or by their id where a shell would need quotes; and files."""
    from offspec.chat.archive import Archive
    from offspec.ui.path_completion import complete_explicit_path

    saved = [
        (entry.title if _PLAIN.fullmatch(entry.title) else entry.id, f"{entry.title}, {entry.model}")
        for entry in Archive().list()
    ]
    return _fitting(incomplete, [*saved, *complete_explicit_path(incomplete, (".json",))])


def config_keys(incomplete: str) -> Offered:
    """Every key."""
    from offspec.ui.cli.defaults import KEYS

    return _fitting(incomplete, [(key, "") for key in KEYS])


def set_config_keys(incomplete: str) -> Offered:
    """Keys that have a value."""
    from offspec.core.user_config import UserConfig

    with suppress(OffspecError):
        return _fitting(incomplete, [(key, str(value)) for key, value in UserConfig().values.items()])
    return []


def config_values(ctx: typer.Context, incomplete: str) -> Offered:
    """Values of the key that was named, as its option has them."""
    from offspec.ui.cli.defaults import THEMES

    key = str(ctx.params.get("key", ""))
    if key == "theme":
        return _fitting(incomplete, [(theme, "") for theme in THEMES])
    group: Any = ctx.find_root().command
    options = [option for option in group.commands["chat"].params if option.name == key.replace("-", "_")]
    return [
        (item.value, item.help or "") for option in options for item in option.shell_complete(ctx, incomplete)
    ]


def _fitting(incomplete: str, offered: Sequence[tuple[str, str]] | Iterator[tuple[str, str]]) -> Offered:
    return [(value, meaning) for value, meaning in offered if value.startswith(incomplete)]
