"""`bench.lib.widen`: a widened model is built once and used again."""

from pathlib import Path

import pytest

from bench.lib.cgroup import BenchError
from bench.lib.widen import default_folder, ensure
from offspec.checkpoint.demo_wide import demo_wide_folder
from offspec.core.errors import CheckpointError
from tests.support.bench_models import make_model


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "small"
    make_model(folder)
    return folder


def test_ensure_builds_once_and_knows_its_source(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "wide"
    assert ensure(str(small), out, 2) == (out, True)
    assert ensure(str(small), out, 2) == (out, False)
    with pytest.raises(BenchError, match="--force"):
        ensure(str(small), out, 4)
    assert ensure(str(small), out, 4, force=True) == (out, True)
    other = tmp_path / "other"
    make_model(other, num_hidden_layers=1)
    with pytest.raises(BenchError, match="--force"):
        ensure(str(other), out, 4)


def test_force_spares_a_folder_that_is_not_its_own(small: Path, tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("keep me")
    with pytest.raises(CheckpointError, match="is not a widened model"):
        ensure(str(small), tmp_path / "letters", 2, force=True)
    assert (tmp_path / "letters" / "dear.txt").exists()


def test_benches_share_the_wide_demo_model_with_the_program() -> None:
    assert default_folder("demo", 4) == demo_wide_folder()
