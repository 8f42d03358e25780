"""The stage on which plans are tested; see `world.py`."""

from pathlib import Path

import pytest

from offspec.engine import rehearsal as planning
from offspec.plan import make as draw_up
from offspec.plan import needs
from offspec.plan import prepare as choose
from tests.engine.world import LAYERS, World
from tests.tiny import disturb, write_model


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a draft that agrees with it in part."""
    folder = tmp_path_factory.mktemp("models")
    target = write_model(folder / "target", num_hidden_layers=LAYERS)
    near = write_model(folder / "near", num_hidden_layers=LAYERS)
    disturb(near)
    return target, near


@pytest.fixture
def world(pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("OFFSPEC_CACHE", str(tmp_path / "cache"))
    found = World(pair, tmp_path / "cache")
    monkeypatch.setattr(choose, "measure", found.measure)
    monkeypatch.setattr(needs, "_COMPILER", 0)  # many times as large as these models
    monkeypatch.setattr(draw_up, "BUDGETS", (1, 16, 64, 256))
    monkeypatch.setattr(draw_up, "WIDTHS", (4, 16))
    return found


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer prompts, in words that tiny models know."""
    monkeypatch.setattr(planning, "REHEARSAL", ("w5 w9 w17 w33", "w64 w20", "w8", "w40 w41"))
