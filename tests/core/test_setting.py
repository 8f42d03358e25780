"""Declarations of settings: complete, and consistent for type checkers."""

import math
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import pytest

from offspec import RequestError
from offspec.core.config import EngineConfig, SamplingParams, Settings
from offspec.core.setting import PLANS, Setting, settings_of

PATHS = get_args(get_type_hints(Settings)["corpus"])


def written(setting: Setting) -> set[Any]:
    """Types that a caller may pass for a setting."""
    if setting.name in ("draft", "corpus"):  # one, or several
        return {*PATHS}
    kinds = {*get_args(setting.kind)} if NoneType in get_args(setting.kind) else {setting.kind}
    return kinds | ({str} if setting.unit == "bytes" else set())


def test_type_checkers_know_every_setting() -> None:
    """`Settings` has the fields of `EngineConfig`, with their types; sizes may be text."""
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
            assert setting.range_error(setting.default) == "", name


@pytest.mark.parametrize(
    ("name", "within", "outside", "wanted"),
    [
        ("temperature", 0, math.inf, "0 or above"),
        ("temperature", 9, math.nan, "0 or above"),
        ("top_p", 1, 0, "above 0 and at most 1"),
        ("min_p", 1, 1.5, "between 0 and 1"),
        ("top_k", 0, -1, r"0 \(off\) or above"),
        ("seed", 2**64 - 1, 2**64, r"between 0 and 2\^64 - 1"),
        ("logprobs", None, -1, "None, or 0 or above"),
        ("stop", ["a"], ["a", ""], "strings that are not empty"),
    ],
)
def test_ranges_have_ends(name: str, within: Any, outside: Any, wanted: str) -> None:
    SamplingParams(**{name: within})
    with pytest.raises(RequestError, match=f"^{name} must be {wanted}, not ") as caught:
        SamplingParams(**{name: outside})
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"budget": 0}, "budget must be 1 or above, not 0: the root is a node too"),
        ({"memory": 0}, "memory must be above 0, not 0"),
        ({"sequences": 1.5}, "sequences must be 1 or above, or auto, not 1.5"),
        ({"draft_bits": 5}, "draft_bits must be 2, 3, 4 or 16, not 5"),
        ({"verify": "x"}, "verify must be 'coupled', 'plain' or 'sequoia', not 'x'"),
    ],
)
def test_errors_name_the_allowed_values(settings: Any, told: str) -> None:
    with pytest.raises(RequestError) as caught:
        EngineConfig("m", **settings)
    assert str(caught.value) == told


def test_options_are_in_the_order_of_the_docstring() -> None:
    assert [*settings_of(EngineConfig)][:4] == ["model", "draft", "draft_bits", "memory"]
    assert [*settings_of(EngineConfig)] != [*EngineConfig.__dataclass_fields__]


def test_signature_has_plain_types() -> None:
    assert EngineConfig.__init__.__annotations__["memory"] == int | None
    assert SamplingParams.__init__.__annotations__["stop"] == tuple[str, ...]
    assert EngineConfig("m").corpus == () and EngineConfig("m", corpus=(Path("x"),)).corpus == (Path("x"),)
