"""Plan benches: scripted `offspec plan`, and published figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from bench.lib.cgroup import BenchError
from bench.plan import __main__ as plan
from bench.plan import cases as plan_cases
from bench.plan import published
from tests.support.bench_runs import RunBench
from tests.support.sample_plans import small, validation


def test_an_inaccurate_plan_is_reported_until_it_is_measured_again(
    run_bench: RunBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, said = list[str](), validation().to_json()
    wrong = {"tok_per_s": {"predicted": 1.0, "measured": 0.0, "error": float("nan")}}

    def run(args: Any, argv: Sequence[str], memory: int) -> tuple[str, dict[str, int]]:
        asked.append(" ".join(argv[-20:]))
        if memory == 750_000_000:
            raise BenchError("the measured process was killed")
        found = {"plan": small().to_json(), **said, **(wrong if memory == 10**9 else {})}
        return json.dumps(found), {"cgroup_peak_bytes": 90}

    monkeypatch.setattr(plan, "run_measured", run)
    monkeypatch.setattr(plan_cases, "child", lambda module, *words: "670000000")
    monkeypatch.setattr(plan, "read_disk", lambda args, target: 2e9)
    ran = run_bench(plan.main, "--cases", "x4:1.5GB:1", "x1:least:0", "--first-run")
    assert ran.code == 0 and ran.lines[0].startswith("ceiling  x1: files are read at 2.00 GB/s")
    options = "--replan --validate --prompts 8 --json --quiet --device cpu"
    assert asked[0].endswith(f"plan demo --draft self --memory 670000000 --temperature 0 {options}")
    wide = "--draft demo --draft-bits 4 --context 1024 --memory 1500000000 --temperature 1"
    assert asked[1].endswith(f"{wide} {options}")
    found = ran.record["cases"][1]
    error = pytest.approx(0.03 / 1.38)
    assert found["seconds_per_pass"] == {"predicted": 1.35, "measured": 1.38, "error": error}
    assert (found["plan"]["budget"], found["plan"]["disk_bytes"]) == (256, 2_712_000_000)
    ran = run_bench(plan.main, "--cases", "x1:1GB:0", "x1:0.75GB:0")
    assert ran.code == 1 and [case["case"] for case in ran.record["cases"] if case["missed"]] == [
        "x1:0.75GB:0",
        "x1:1GB:0",
    ]
    wrong.clear()
    assert run_bench(plan.main, "--cases", "x1:1GB:0").code == 1, "the record still has the other case"


def test_published_figures_are_predicted(run_bench: RunBench) -> None:
    """Predictions are within 30 % in all but one of the rows; larger errors are explained."""
    ran = run_bench(published.main)
    rows = ran.record["rows"]
    assert ran.code == 0
    assert all(abs(row["ratio"] - 1) <= published.WANTED or row["why_not"] for row in rows)
    assert len(rows) == 11 and sum(abs(row["ratio"] - 1) > published.WANTED for row in rows) <= 1
    for name, parameters in (("Llama-3-70B", 69.5e9), ("Llama-3-8B", 7.5e9), ("Llama-2-7B", 6.6e9)):
        assert published.sizes_of(name).parameters == pytest.approx(parameters, rel=0.01)
