"""The bench of calibration, on a tiny model and on trees made by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bench.plan import calibration
from offspec.sampling.token_tree import TokenTree
from tests.support.bench_runs import RunBench
from tests.support.tiny_models import write_model


def test_a_run_tells_tokens_and_tenths(tmp_path: Path, run_bench: RunBench) -> None:
    small = ["--prompts", "2", "--tokens", "12", "--budget", "24", "--width", "4", "--dtype", "float32"]
    model = str(write_model(tmp_path / "model"))
    ran = run_bench(calibration.main, model, *small, "--temperatures", "0", "1")
    assert ran.code == 0 and ran.record | ran.summary == ran.record
    assert [run["temperature"] for run in ran.summary["runs"]] == [0, 1]
    for run in ran.summary["runs"]:
        assert run["ratio"] == pytest.approx(run["expected"] / run["observed"]) and run["passes"] >= 2
        for kind in ("conditional", "path"):
            assert [row["from"] for row in run[kind]] == pytest.approx([tenth / 10 for tenth in range(10)])
            assert sum(row["nodes"] for row in run[kind]) > 0
    assert ran.plot.exists()


def _pass(nodes: tuple[int, ...], tokens: tuple[int, ...]) -> calibration.Pass:
    """Root, children 5 (probability 1/2) and 6 (1/4), and 7 (1/2 of the first's) below the first."""
    tree = TokenTree.build([1, 5, 6, 7], [-1, 0, 0, 1], np.log([1, 0.5, 0.25, 0.25]).tolist())
    grown = SimpleNamespace(tree=tree, steps=1)
    return calibration.look_at(SimpleNamespace(grown=grown, walk=SimpleNamespace(nodes=nodes, tokens=tokens)))


def test_a_miss_decides_the_children_of_walked_nodes() -> None:
    done = _pass((0, 1), (5, 9))
    assert done.expected == pytest.approx(2.0) and done.observed == 2
    assert done.conditional == pytest.approx(np.array([[0.5, 1], [0.25, 0], [0.5, 0]]))
    assert done.path == pytest.approx(np.array([[0.5, 1], [0.25, 0], [0.25, 0]]))


def test_what_is_below_the_end_of_the_text_is_not_known() -> None:
    done = _pass((0,), (5,))
    assert done.expected == pytest.approx(1.0) and done.observed == 1
    assert done.conditional == pytest.approx(np.array([[0.5, 1], [0.25, 0]]))
    assert done.path == pytest.approx(np.array([[0.5, 1], [0.25, 0]]))


def test_tenths_add_up() -> None:
    rows = calibration.tenths(np.array([[0.05, 0], [0.03, 1], [0.95, 1], [1.0, 1]]))
    assert [row["nodes"] for row in rows] == [2, *[0] * 8, 2]
    assert rows[0]["expected"] == pytest.approx(0.04) and rows[0]["observed"] == 0.5
    assert rows[9]["expected"] == pytest.approx(0.975) and rows[9]["observed"] == 1.0
