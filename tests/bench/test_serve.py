"""Server bench with a tiny model."""

from pathlib import Path

import pytest

from bench import serve
from tests.support.bench_runs import RunBench
from tests.support.tiny_models import write_model


@pytest.mark.exhaustive
def test_a_run(run_bench: RunBench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(serve, "WANTED", 0.0)
    ran = run_bench(
        serve.main, str(write_model(tmp_path)), "--prompts", "1", "--tokens", "12", "--rounds", "1"
    )
    assert ran.code == 0 and ran.summary["same_texts"] and ran.summary["ratio"] > 0
