"""Benches that compare ways to use an engine: one toy run of each, and their shared calculations."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from bench import busy, prefill, sequences, soak
from bench.lib import runner
from bench.lib.command import Command
from bench.lib.report import Report
from bench.stream import floor
from offspec_planners.measure.disk import Bandwidth
from tests.support.bench_runs import RunBench
from tests.support.tiny_models import write_model

_DISK = Bandwidth(1000, 1.0, True)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the widened model by a tiny one, and run measured jobs in this process."""
    folder = write_model(tmp_path / "model", num_hidden_layers=2)
    recipe = {"factor": 4, "fingerprint": "", "layer_files": ["model.safetensors"], "layer_bytes": 8000}
    (folder / "widened.json").write_text(json.dumps({**recipe, "head_bytes": 9, "matmul_parameters": 5}))
    monkeypatch.setattr(runner, "widened_model", lambda args: folder)
    monkeypatch.setattr(runner, "raw_bandwidth", lambda args, files: _DISK)
    monkeypatch.setattr(runner, "measured_job", lambda args, module, job: runner.work(job))
    monkeypatch.setattr(floor, "_LEAST_SECONDS", 0.0)
    monkeypatch.setattr(prefill, "_SETTLE_S", 0.0)
    return folder


@pytest.mark.parametrize(
    ("main", "words", "figures"),
    [
        (prefill.main, "--tokens 24 --repeats 1 --memory 3GB --budget 8 --raw-bytes 1MB", {"gemm_seconds"}),
        pytest.param(
            *(sequences.main, "--sequences 2 --answers 2 --tokens 6 --memory 3GB", {"tokens_per_pass"}),
            marks=pytest.mark.exhaustive,
        ),
        (busy.main, "{model} --busy 1 --answers 2 --tokens 3", {"of_alone"}),
        (soak.main, "30 --reload 20", {"resident_mb", "threads"}),
    ],
    ids=["prefill", "sequences", "busy", "soak"],
)
def test_a_toy_run(main: Command, words: str, figures: set[str], model: Path, run_bench: RunBench) -> None:
    given = [word.format(model=model) for word in words.split()]
    streams = main in (prefill.main, sequences.main)
    own = ["--model", str(model), "--no-cgroup", "--keep-caches", "--dtype", "float32"] if streams else []
    ran = run_bench(main, *given, *own)
    assert ran.record | ran.summary == ran.record
    assert all(figures <= row.keys() for row in ran.summary["runs"])
    assert not any("answers differ" in text for text in ran.summary["shortfalls"])
    assert ran.code == bool(ran.summary["shortfalls"])
    if main is soak.main:  # memory still grows at first
        assert ran.summary["runs"][0]["files"] <= 0


def test_figures_are_medians_and_each_way_has_the_same_tokens() -> None:
    runs: list[dict[str, Any]] = [{"s": s, "kind": "a", "token_ids": [[5, 6], [7]]} for s in (1.0, 9.0, 2.0)]
    assert runner.tally(runs) == {"s": 2.0, "kind": "a"}
    longer, other = {"token_ids": [[5, 6, 8]]}, {"token_ids": [[5, 9]]}
    assert runner.differences({"a": runs, "b": [longer]}) == []
    assert runner.differences({"a": runs, "b": [longer, other]}) == ["answers differ from those of a: b"]


def test_ways_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = count()
    monkeypatch.setattr(runner, "measured_job", lambda args, module, job: {"turn": next(turn)})
    args = sequences.main.parser().parse_args(["--rounds", "3"])
    found = runner.in_turns("sequences", {"a": {}, "b": {}}, args, Report())
    assert [run["turn"] for run in found["a"]] == [0, 3, 4]


def test_shortfalls(monkeypatch: pytest.MonkeyPatch) -> None:
    args = prefill.main.parser().parse_args([])
    assert prefill.shortfalls({"nf4": {"ratio_with_attention": 1.2}}, args) == []
    assert len(prefill.shortfalls({"nf4": {"ratio_with_attention": 1.21}}, args)) == 1
    rows = {"1": {"tokens_per_s": 2.0}, "8": {"tokens_per_s": 5.9}}
    assert sequences.shortfalls(rows, args) == ["8 sequences are 2.95 times one, less than 3.0"]
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    assert [busy.fair_share(number, "in this session") for number in (1, 2, 4)] == [0.75, 0.5, 1 / 3]
    rows = {"alone": {"tokens_per_s": 9.0}, "in this session": {"tokens_per_s": 2.6}}
    assert len(busy.shortfalls(rows, busy.main.parser().parse_args([]))) == 1
    grown = soak.shortfalls({"growth": {"resident_mb": 0.1, "threads": 1.0, "files": 0.0}}, args)
    assert grown == ["1 threads of growth per thousand requests"]


def test_growth_is_a_slope_over_the_second_half() -> None:
    memory = (9.0, 9.0, 9.0, 6.0, 8.0, 10.0)
    readings = [
        {"requests": 1000.0 * at, "resident_mb": mb, "threads": 4.0, "files": 9.0}
        for at, mb in enumerate(memory)
    ]
    assert soak.slopes(readings) == {"resident_mb": 2.0, "threads": 0.0, "files": 0.0}
