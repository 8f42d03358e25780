"""The bench of draft steps, on tiny models."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import draft
from tests.support.bench_runs import RunBench
from tests.support.tiny_models import write_model

SMALL = ["--widths", "2", "5", "--prefix", "9", "--rounds", "2", "--dtype", "float32"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft, "_EFFICIENT_ROWS", 4)
    monkeypatch.setattr(draft, "read_rate", lambda: 1e9)


@pytest.mark.parametrize("bits", ["4", "16"])
def test_both_forwards_are_told_beside_the_floor(bits: str, tmp_path: Path, run_bench: RunBench) -> None:
    ran = run_bench(draft.main, str(write_model(tmp_path / "model")), *SMALL, "--draft-bits", bits)
    assert ran.code == 0 and ran.record | ran.summary == ran.record
    assert [row["width"] for row in ran.summary["steps"]] == [2, 5]
    for row in ran.summary["steps"]:
        assert row["floor_seconds"] > 0
        assert row["of_floor"] == pytest.approx(row["floor_seconds"] / row["lean_seconds"])
        assert row["speedup"] == pytest.approx(row["transformers_seconds"] / row["lean_seconds"])


@pytest.mark.exhaustive
def test_a_draft_of_another_shape_is_measured_as_it_is(tmp_path: Path, run_bench: RunBench) -> None:
    ran = run_bench(draft.main, str(write_model(tmp_path / "model", "gpt2")), *SMALL)
    assert all("lean_seconds" not in row for row in ran.summary["steps"])


def test_the_floor_is_the_slower_of_reading_and_multiplying() -> None:
    floor = draft.Floor(nbytes=100, weights=50, bytes_per_s=100.0, flops_per_s=1000.0)
    assert floor.seconds(1) == 1.0 and floor.seconds(20) == 2.0
