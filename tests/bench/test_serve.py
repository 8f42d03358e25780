"""The bench of the server, with the demo model."""

import pytest

from bench import serve
from tests.support.bench_runs import RunBench


@pytest.mark.exhaustive
def test_a_run(run_bench: RunBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "WANTED", 0.0)
    ran = run_bench(serve.main, "--prompts", "1", "--tokens", "12", "--rounds", "1")
    assert ran.code == 0 and ran.summary["same_texts"] and ran.summary["ratio"] > 0
