"""The bench of conversations on disk, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import prefixes
from offspec.engine.prefill_rate import PrefillRate
from offspec_planners.measure import Bandwidth
from tests.support.bench_runs import RunBench
from tests.support.tiny_models import write_model


@pytest.mark.exhaustive
def test_a_run(tmp_path: Path, run_bench: RunBench, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "model", vocab_size=1024, max_position_embeddings=1024)
    recipe = {"factor": 4, "fingerprint": "", "layer_files": ["model.safetensors"], "layer_bytes": 8000}
    (folder / "widened.json").write_text(json.dumps({**recipe, "head_bytes": 9, "matmul_parameters": 5}))
    monkeypatch.setattr(prefixes, "widened", lambda args: folder)
    monkeypatch.setattr(prefixes, "raw_bandwidth", lambda *args: Bandwidth(1000, 1.0, True))
    monkeypatch.setattr(prefixes, "WANTED", 1e9)
    monkeypatch.setattr("offspec.engine.prefixes.LEAST", 16)
    monkeypatch.setattr(PrefillRate, "seconds", lambda self, rows: None)
    ran = run_bench(prefixes.main, "--length", "300", "--rounds", "1")
    assert ran.code == 0
    assert ran.lines[0].startswith("ceiling") and ran.lines[-2].startswith("reached")
    reused = ran.summary["reused"]
    assert reused["cold"] == reused["another, cold"] == 0
    assert reused["from disk"] > 0.9 and reused["after a restart"] > 0.9
    assert ran.summary["file_bytes"] > 300 * 3 * 2 * 2 * 8 * 2
    assert {run["name"] for run in ran.record["runs"]} == {*reused}
