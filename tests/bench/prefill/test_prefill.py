"""The bench of long prompts: its arithmetic, and a run on a tiny random model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bench.lib import random_model
from bench.lib.random_model import SHAPES
from bench.prefill import __main__ as prefill
from bench.prefill import worker
from bench.stream import floor
from bench.stream.floor import Compute
from tests.support.bench_runs import RunBench


def found_runs(**changes: Any) -> dict[str, Any]:
    run = {"tokens": 8, "raw_before": 100.0, "raw_after": 300.0, "draft_seconds": 0.0, "bytes": 400}
    return {
        "placement": {"streamed_layers": 3, "head": "device", **changes},
        "runs": [{**run, "seconds": seconds} for seconds in (4.0, 5.0, 9.0)],
    }


def test_prefill_is_judged_by_the_larger_of_trip_and_floor() -> None:
    recipe = {"layer_bytes": 800, "layer_files": ["a"] * 4, "head_bytes": 200}
    row = prefill.tally(found_runs(), {8: Compute(2.0, 1.0, 4.0)}, recipe)[0]
    assert row["trip_bytes"] == 600
    assert row["trip_seconds"] == 3.0
    assert row["ratio"] == pytest.approx(5 / 3)  # the trip is longer than 2 s of GEMM
    assert row["ratio_with_attention"] == pytest.approx(5 / 3)
    assert row["ratio_with_layers"] == pytest.approx(5 / 4)
    with_head = prefill.tally(found_runs(head="disk"), {8: Compute(5.0, 1.0, 9.0)}, recipe)[0]
    assert with_head["trip_seconds"] == 4.0
    assert with_head["ratio"] == 1.0
    packed = prefill.tally(found_runs(), {8: Compute(2.0, 1.0, 4.0)}, None)[0]
    assert packed["trip_bytes"] == 400  # as they came


@pytest.mark.exhaustive
def test_a_run(
    tiny_random: Path, tmp_path: Path, run_bench: RunBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = Path(shutil.copytree(tiny_random, tmp_path / "tiny"))
    files = [random_model.layer_file(index) for index in range(SHAPES["tiny"].layers)]
    layer_bytes = sum((tiny / name).stat().st_size for name in files)
    recipe = {"factor": 4, "fingerprint": "tiny", "layer_files": files, "layer_bytes": layer_bytes}
    (tiny / "widened.json").write_text(json.dumps({**recipe, "head_bytes": 32768}))
    monkeypatch.setattr(floor, "_LEAST_SECONDS", 0.0)
    monkeypatch.setattr(worker, "_SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(prefill, "widened", lambda args: tiny)
    monkeypatch.setattr(prefill, "measured_job", lambda args, module, job: worker.work(job))
    words = ["--tokens", "40", "24", "--repeats", "2", "--memory", "3GB", "--budget", "8", "--no-cgroup"]
    raw = ["--raw-bytes", "1MB", "--raw-threads", "1", "--draft", "auto"]
    ran = run_bench(prefill.main, *words, *raw)
    assert (ran.code, ran.summary["tokens"]) == (0, 40)
    assert ran.summary["seconds"] > 0
    assert [row["tokens"] for row in ran.summary["rows"]["none"]] == [24, 40]
    runs = {draft: found["runs"] for draft, found in ran.record["processes"].items()}
    assert len(runs["none"]) == 4
    assert runs["none"][0]["tree_nodes"] == 1 < runs["auto"][0]["tree_nodes"]
    assert "<svg" in ran.plot.read_text()
