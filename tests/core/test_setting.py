"""Declarations of settings: complete, and the same for type checkers."""

from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import pytest

from offspec.core.config import EngineConfig, SamplingParams, Settings
from offspec.core.setting import PLANS, Setting, settings_of

PATHS = get_args(get_type_hints(Settings)["corpus"])


def written(setting: Setting) -> set[Any]:
    """Types of a setting as a caller may write it."""
    if setting.name in ("draft", "corpus"):  # one, or several
        return {*PATHS}
    kinds = {*get_args(setting.kind)} if NoneType in get_args(setting.kind) else {setting.kind}
    return kinds | ({str} if setting.unit == "bytes" else set())


def test_type_checkers_know_every_setting() -> None:
    """`Settings` names those of `EngineConfig`, with their types; sizes may be texts."""
    declared = {name: it for name, it in settings_of(EngineConfig).items() if name != "model"}
    hints = get_type_hints(Settings)
    assert hints.keys() == declared.keys()
    for name, setting in declared.items():
        kind = hints[name]
        plain = NoneType in get_args(kind) or setting.unit == "bytes" or name in ("draft", "corpus")
        assert ({*get_args(kind)} if plain else {kind}) == written(setting), name


@pytest.mark.parametrize("kind", [EngineConfig, SamplingParams])
def test_settings_are_documented_and_have_valid_defaults(kind: type) -> None:
    for name, setting in settings_of(kind).items():
        assert setting.help.endswith("."), name
        assert {*setting.commands} <= {*PLANS}, name
        assert setting.group or not (setting.commands or setting.saved), f"{name} has no option"
        if name != "model":
            assert setting.fault(setting.default) == "", name


def test_the_signature_has_plain_types() -> None:
    assert EngineConfig.__init__.__annotations__["memory"] == int | None
    assert SamplingParams.__init__.__annotations__["stop"] == tuple[str, ...]
    assert EngineConfig("m").corpus == () and EngineConfig("m", corpus=(Path("x"),)).corpus == (Path("x"),)
