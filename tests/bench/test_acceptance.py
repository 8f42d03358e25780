"""Acceptance bench with a tiny model."""

from pathlib import Path

import pytest

from bench import acceptance
from tests.support.bench_runs import RunBench
from tests.support.tiny_models import write_model


def test_a_run(tmp_path: Path, run_bench: RunBench) -> None:
    small = "--prompts 2 --tokens 9 --budget 8 --width 4 --dtype float32 --check"
    ran = run_bench(acceptance.main, str(write_model(tmp_path / "model")), *small.split())
    assert ran.code == 0 and ran.record | ran.summary == ran.record
    runs = {(run["verify"], run["temperature"]): run for run in ran.summary["runs"]}
    assert list(runs) == [("coupled", 0.0), ("coupled", 1.0), ("plain", 1.0)]  # greedy once
    for run in runs.values():
        assert run["pooled"] == pytest.approx(run["tokens"] / run["passes"]) and run["passes"] < run["tokens"]
        assert run["share_of_greedy"] == run["pooled"] / runs["coupled", 0]["pooled"]
    assert all(run["check"]["prompts_with_mismatch"] == 0 for key, run in runs.items() if key[0] == "coupled")
