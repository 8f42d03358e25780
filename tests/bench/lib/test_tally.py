"""Runs with and without speculation side by side, and the process that answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.lib import tally, worker
from offspec_planners.measure import Bandwidth
from tests.support.products import some
from tests.support.tiny_models import write_model


@pytest.fixture
def ceiling() -> tally.Ceiling:
    disk = Bandwidth(1000, 1.0, True)
    return tally.Ceiling(disk, layer_bytes=500, head_bytes=10, flops_per_token=10, gemm={1: 100.0, 8: 400.0})


def test_ceiling_is_bytes_and_flops_over_measured_rates(ceiling: tally.Ceiling) -> None:
    assert ceiling.link_seconds == 0.5
    assert ceiling.compute_seconds(1) == 0.1
    assert ceiling.compute_seconds(8) == 0.2
    assert ceiling.compute_seconds(6) == 0.15  # at the rate of 8, the nearest


def run_of(speculate: bool, tokens: int, passes: int) -> dict[str, Any]:
    """Passes of a second and 100 bytes each."""
    halves = {"draft_seconds": 0.5, "target_seconds": 0.5}
    answer = {
        "id": "chat-1",
        "token_ids": list(range(tokens)),
        "tokens": tokens,
        "passes": passes,
        "seconds": float(passes),
        "ttft_s": 1.0,
        "finish_reason": "length",
        "bytes_streamed": 100 * passes,
        "per_pass": [{"tree_nodes": 8, **halves}] * passes,
        "mismatches": [{"gap": 0.25}] if speculate else None,
        **{name: passes * seconds for name, seconds in halves.items()},
    }
    about = {"speculate": speculate, "temperature": 0.0, "raw_bytes_per_s": 200.0}
    return {**about, "answers": [answer], "cgroup_peak_bytes": 7}


@pytest.fixture
def runs() -> list[dict[str, Any]]:
    return [run_of(False, 8, 8), run_of(True, 16, 4)]


def test_tally_projects_off_to_the_tokens_of_on(runs: list[dict[str, Any]], ceiling: tally.Ceiling) -> None:
    row = tally.tally(runs, 0.0, ceiling)
    assert row["tokens_per_pass"] == 4.0
    assert row["off_seconds_per_token"] == 1.0
    assert row["speed_up"] == 4.0  # 16 passes of a second against 4
    assert row["prompts_with_another_token"] == 0
    assert row["check_gaps"] == {"chat-1": 0.25}
    assert row["on_link_use"] == 0.5  # 100 bytes a second of 200
    assert row["nodes_per_pass"] == 8
    assert row["ceiling_seconds_per_pass"] == 0.5
    assert row["ceiling_tokens_per_s"] == 8.0
    assert row["cgroup_peak_bytes"] == 7


@pytest.mark.parametrize(
    ("change", "value", "place"), [("token_ids", [0, 1, 99], 2), ("finish_reason", "eos", 8)]
)
def test_tally_sees_other_tokens_and_early_ends(
    change: str, value: Any, place: int, runs: list[dict[str, Any]], ceiling: tally.Ceiling
) -> None:
    runs[0]["answers"][0][change] = value
    row = tally.tally(runs, 0.0, ceiling)
    assert (row["prompts_with_another_token"], row["first_differences"]) == (1, {"chat-1": place})


@pytest.mark.exhaustive
@pytest.mark.parametrize("speculate", some([False, True], True))
def test_worker_tells_every_pass(speculate: bool, tmp_path: Path, ceiling: tally.Ceiling) -> None:
    load = {"model": str(write_model(tmp_path / "model")), "memory": "3GB", "dtype": "float32", "budget": 8}
    job = {
        "load": {**load, "draft": "substitute" if speculate else "none", "learn": False},
        "params": {"temperature": 0.0, "max_tokens": 6},
        "seed": 1,
        "speculate": speculate,
        "check": speculate,
        "prompts": [{"number": 0, "id": "chat-1", "text": "hello"}],
    }
    found = json.loads(json.dumps(worker.work(job)))
    (answer,) = found["answers"]
    assert len(answer["per_pass"]) == answer["passes"] > 0 and found["process_peak_bytes"] > 0
    assert (answer["mismatches"] == []) == speculate
    both = [{**found, "temperature": 0.0, "raw_bytes_per_s": 1.0, "speculate": on} for on in (False, True)]
    assert tally.tally(both, 0.0, ceiling)["on_tokens"] == answer["tokens"]
