"""Lossless bench on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.lossless import __main__ as lossless
from bench.lossless import worker
from bench.lossless.cases import BUDGETS
from tests.support.bench_runs import RunBench
from tests.support.tiny_models import write_model


def test_changed_tokens_and_early_ends_are_reported_with_their_settings(
    tmp_path: Path, run_bench: RunBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers with 7 nodes are falsified, those with 64 end early; all others agree, in float32."""
    prompts, state = tmp_path / "prompts.jsonl", tmp_path / "state.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"one {i} two"}) + "\n" for i in range(3)))

    def run(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for found in map(json.loads, map(json.dumps, worker.work(json.loads(json.dumps(job))))):
            if "budget 7 " in found.get("key", ""):
                found["answers"][1][2] ^= 1
            if "budget 64 " in found.get("key", ""):
                found["ends"][0] = "eos"
            yield found

    monkeypatch.setattr(lossless, "run", run)
    model = str(write_model(tmp_path / "tiny"))
    words = ["--models", model, "--prompt-file", str(prompts), "--state", str(state), "--dtype", "float32"]
    words += ["--tokens", "6", "--second-tokens", "4", "--context", "128"]
    ran = run_bench(lossless.main, *words)
    assert ran.code == 1 and ran.record | ran.summary == ran.record
    assert (ran.summary["cases"], ran.summary["mismatches"]) == (12, 6)
    assert [ran.summary["settings"][f"budget {budget}"]["mismatches"] for budget in BUDGETS] == [0, 3, 3, 0]
    places = {(miss["turn"], miss["index"], miss["token"] is None) for miss in ran.record["found"]}
    assert places == {(1, 2, False), (0, 6, True)}
    state.write_text(state.read_text()[:-9])  # a run that was interrupted in the middle of a line
    assert run_bench(lossless.main, *words, "--resume").summary["cases"] == 12
