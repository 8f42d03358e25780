"""Fixtures for tests of packs."""

from pathlib import Path

import pytest

from tests.model.quantize.stage import LAYERS, SIZES, Bench
from tests.support.tiny_models import write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny", num_hidden_layers=LAYERS, **SIZES)


@pytest.fixture
def bench(model: Path, tmp_path: Path) -> Bench:
    (tmp_path / "out").mkdir()
    return Bench(model, tmp_path / "out")
