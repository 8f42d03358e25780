"""The bench of draft steps, on tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import draft
from tests.support.tiny_models import write_model


def _run(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    out = tmp_path / "draft.json"
    small = ["--widths", "2", "5", "--prefix", "9", "--rounds", "2", "--dtype", "float32", "--json", str(out)]
    assert draft.main([str(model), *small, *more]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ceiling") and sum(line.startswith("reached") for line in lines) == 2
    summary: dict[str, Any] = json.loads(lines[-1])
    record = json.loads(out.read_text())
    assert {key: record[key] for key in summary} == summary and str(tmp_path) not in out.read_text()
    return summary


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft, "_EFFICIENT_ROWS", 4)
    monkeypatch.setattr(draft, "read_rate", lambda: 1e9)


@pytest.mark.parametrize("bits", ["4", "16"])
def test_both_forwards_are_told_beside_the_floor(
    bits: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = _run(write_model(tmp_path / "model"), tmp_path, capsys, "--draft-bits", bits)
    assert [row["width"] for row in summary["steps"]] == [2, 5]
    for row in summary["steps"]:
        assert row["floor_seconds"] > 0
        assert row["of_floor"] == pytest.approx(row["floor_seconds"] / row["lean_seconds"])
        assert row["speedup"] == pytest.approx(row["transformers_seconds"] / row["lean_seconds"])


def test_a_draft_of_another_shape_is_measured_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = _run(write_model(tmp_path / "model", "gemma"), tmp_path, capsys)
    assert all("lean_seconds" not in row for row in summary["steps"])


def test_the_floor_is_the_slower_of_reading_and_multiplying() -> None:
    floor = draft.Floor(nbytes=100, weights=50, bytes_per_s=100.0, flops_per_s=1000.0)
    assert floor.seconds(1) == 1.0 and floor.seconds(20) == 2.0


def test_both_ways_say_the_same(tmp_path: Path) -> None:
    folder = str(write_model(tmp_path / "model"))
    plain, taken = (draft.open_draft(folder, 16, "float32", 32) for _ in range(2))
    lean = taken.lean(32)
    assert lean is not None
    said = [
        [
            int(draft.Steps(model, draft.new_scorer(96, 1.0), 9).run(width)[1].token[0, 0])
            for width in (1, 4, 7)
        ]
        for model in (plain.tree_model, lean)
    ]
    assert said[0] == said[1]
