"""What the bench of kernels does on CUDA devices alone, as far as a CPU can run it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.kernels import clock as kernels_clock
from bench.kernels import graphs as kernels_draft
from bench.kernels import tune as kernels_tune
from bench.kernels.cases import Setting, Spec
from bench.lib.cgroup import BenchError
from tests.support.kernel_device import kernel_device
from tests.support.tiny_models import write_model

CPU = torch.device("cpu")


@pytest.mark.kernels
def test_a_grid_of_cuts_is_tried_and_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, values in {"ROWS": (16,), "KEYS": (16, 32), "WARPS": (4,), "STAGES": (2,)}.items():
        monkeypatch.setattr(kernels_tune, name, values)
    monkeypatch.setattr(kernels_tune, "SPLITS", (1, 2))
    monkeypatch.setattr(kernels_clock, "_TURNS", 2)
    setting = Setting(torch.device(kernel_device()))
    tried = kernels_tune.tune(Spec("tree_attention", (40, 5, 2, 1, 16), "float32"), setting, 0.0)
    cuts = [tuple(entry["blocks"].items()) for entry in tried]
    assert len(set(cuts)) == len(cuts) >= 4 and sum(entry["chosen"] for entry in tried) == 1
    assert [entry["seconds"] for entry in tried] == sorted(entry["seconds"] for entry in tried)


@pytest.mark.exhaustive
def test_draft_steps_are_compared_at_every_width(tmp_path: Path) -> None:
    rows = kernels_draft.measure_graphs(str(write_model(tmp_path / "model")), CPU, (2, 5), rounds=1)
    assert [row["width"] for row in rows] == [2, 5]
    for row in rows:
        assert row["gain"] == pytest.approx(row["plain_seconds"] / row["graphs_seconds"])


def test_a_draft_without_graphs_is_refused(tmp_path: Path) -> None:
    model = str(write_model(tmp_path / "model", "gpt2"))
    with pytest.raises(BenchError, match="not of a plain shape"):
        kernels_draft.measure_graphs(model, CPU, (2,), rounds=1)
