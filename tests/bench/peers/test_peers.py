"""Peers bench without peers: its calculations, and the program on scripted runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.peers import __main__ as peers
from bench.peers import jobs, llama, summary
from bench.peers.jobs import ACCELERATE, ASSISTED, OFF, OFFSPEC, PACKED, BenchSetup, Variant
from offspec_planners.measure.disk import Bandwidth
from tests.support.bench_runs import RunBench

RECIPE = {"factor": 4, "fingerprint": "", "layer_files": ["a"] * 10, "layer_bytes": 1000, "head_bytes": 150}
LOG_ALONE = """prompt eval time =    1500.00 ms /    16 tokens (    9.59 ms per token)
I common_perf_print:        eval time =    1050.00 ms /     7 runs   (   15.42 ms per token)
"""
LOG_DRAFTED = """encoded   16 tokens in    0.500 seconds, speed:   68.175 t/s
0.01.319.382 I decoded    8 tokens in    3.000 seconds, speed:   20.929 t/s
0.01.319.447 I n_accept  = 5
"""


def answer(emitted: list[int], seconds: list[float], name: str = "chat-1", **changes: Any) -> dict[str, Any]:
    made, passes = sum(emitted), len(emitted)
    counts = {"tokens": made, "passes": passes, "seconds": sum(seconds), "ttft_s": seconds[0]}
    each = [{"emitted": e, "seconds": s} for e, s in zip(emitted, seconds, strict=True)]
    ends = {"token_ids": list(range(made)), "read_bytes": 1000 * passes, "finish_reason": "length"}
    return {"id": name, **counts, **ends, "per_pass": each, **changes}


def run(contender: str, found: dict[str, Any] | None, variant: str = "") -> dict[str, Any]:
    place = {"contender": contender, "variant": variant, "temperature": 0.0, "prompt": "chat-1"}
    if found is None:
        return {**place, "error": {"kind": "killed", "message": "it needed more"}}
    return {**place, "load_seconds": 1.0, "load_read_bytes": 10, "process_peak_bytes": 7, "answers": [found]}


def test_short_answers_are_projected() -> None:
    one_by_one = answer([1, 1, 1, 1], [5.0, 2.0, 2.0, 9.0])
    assert summary.project(one_by_one, 11) == 5.0 + 10 * 2.0  # the median pass
    assert summary.project(answer([4, 6, 2], [5.0, 3.0, 1.0]), 20) == 5.0 + 16 * 0.5  # the mean rate
    alone, drafted = llama.read_alone(LOG_ALONE), llama.read_drafted(LOG_DRAFTED)
    assert summary.project(alone, 48) == pytest.approx(1.5 + 47 * 0.15)
    assert (drafted["tokens"], drafted["passes"], drafted["seconds"]) == (8, 3, pytest.approx(3.5))
    assert summary.decoding([drafted]) == pytest.approx(8 / 3.0)


def test_the_fastest_settings_count_and_differing_tokens_are_reported() -> None:
    runs = [
        run(OFFSPEC, answer([4, 4], [1.0, 1.0])),
        run(PACKED, answer([4, 4], [2.0, 0.5])),
        run(OFF, answer([1] * 3, [1.0] * 3)),
        run(ASSISTED, answer([2] * 4, [2.0] * 4), "slow"),
        run(ASSISTED, answer([4] * 2, [2.0] * 2, token_ids=[0, 9]), "fast"),
        run(ASSISTED, None, "greedy for memory"),
        run(ACCELERATE, answer([1, 1], [3.0, 2.0], finish_reason="eos"), "only"),
        run(jobs.LLAMA, answer([1, 1, 1], [3.0, 2.0, 2.0]), "mapped"),
    ]
    row = summary.summarize(runs, 0.0)["contenders"]
    assert row[ASSISTED]["settings"] == "fast" and set(row[ASSISTED]["settings_tried"]) == {"slow", "fast"}
    assert (row[ASSISTED]["offspec_is_faster_by"], row[ASSISTED]["tokens_per_pass"]) == (2.0, 4.0)
    assert [failed["settings"] for failed in row[ASSISTED]["failures"]] == ["greedy for memory"]
    assert row[ACCELERATE]["tokens_per_s"] == 8 / (3.0 + 7 * 2.0)
    assert (row[jobs.LLAMA]["offspec_decodes_faster_by"], row[jobs.LLAMA]["same_tokens"]) == (16.0, None)
    assert row[OFFSPEC]["same_tokens"] and row[ASSISTED]["first_differences"] == {"chat-1": 1}
    assert row[ACCELERATE]["first_differences"] == {"chat-1": 2}  # it ended where the longer one went on
    sentences = summary.shortfalls([{"temperature": 0.0, "contenders": row}], jobs.PLAIN)
    assert (
        len(sentences) == 2 and "2.00x assisted generation at temperature 0; the target is 5x" in sentences[1]
    )


def test_a_run(tmp_path: Path, run_bench: RunBench, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "widened.json").write_text(json.dumps(RECIPE))
    seen: list[tuple[str, str, str]] = []

    def scripted(
        args: Any, setup: BenchSetup, variant: Variant, group: Any, temperature: float
    ) -> dict[str, Any]:
        name = group[0][1].id
        seen.append((name, variant.contender, variant.name))
        if variant.contender == ACCELERATE:
            return run(ACCELERATE, None)
        step = {OFFSPEC: 0.5, ASSISTED: 2.0}.get(variant.contender, 1.0)
        step /= 2 if "constant 20" in variant.name else 1
        emitted = [4, 4] if variant.contender in (OFFSPEC, ASSISTED) else [1, 1]
        return run(variant.contender, answer(emitted, [step] * 2, name), variant.name)

    monkeypatch.setattr(peers, "widened_model", lambda args: tmp_path)
    monkeypatch.setattr(peers, "child", lambda module, *words: str(tmp_path))
    monkeypatch.setattr(peers, "raw_bandwidth", lambda *args: Bandwidth(1000, 1.0, True))
    monkeypatch.setattr(peers, "prepare", lambda args, *folders: BenchSetup(*folders))
    monkeypatch.setattr(peers, "run", scripted)
    ran = run_bench(peers.main, "--prompts", "2", "--no-cgroup", "--keep-caches", "--temperatures", "0")
    last = ran.summary
    assert ran.code == 1 and any("the target is 5x" in line for line in ran.lines)
    assert (last["speedup_vs_accelerate"], last["speedup_vs_assisted"]) == ({"0": None}, {"0": 2.0})
    tried = {name: [v for p, who, v in seen if (p, who) == (name, ASSISTED)] for name in last["prompts"]}
    assert [len(names) for names in tried.values()] == [5, 1]
    assert tried[last["prompts"][1]] == ["copied to RAM, constant 20"]
