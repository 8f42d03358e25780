"""Stream bench on a tiny random model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from bench.lib.random_model import SHAPES
from bench.stream import __main__ as stream
from bench.stream.floor import Compute, ComputeFloor
from bench.stream.window import PassRunner, Reading, Window
from offspec.checkpoint import open_checkpoint
from offspec.model.loaded import LoadedModel
from offspec_planners.placement import Placement
from tests.support.bench_runs import RunBench


def test_a_window_is_compared_with_the_measurements_on_both_sides() -> None:
    before, after = Reading(150.0, Compute(1.0, 1.0)), Reading(250.0, Compute(3.0, 1.0))
    found = Window(64, 4, 10.0, 1600, 5.0, before, after).figures()
    assert (found["link_bytes_per_s"], found["link_seconds"], found["utilization"]) == (200.0, 2.0, 0.8)
    shares = [found[f"of_bound{kind}"] for kind in ("", "_with_attention")]
    assert shares == pytest.approx([0.8, 1.2])


def test_passes_move_every_streamed_layer_once_and_leave_nothing(tiny_random: Path) -> None:
    checkpoint = open_checkpoint(str(tiny_random))
    target = LoadedModel(checkpoint.folder, checkpoint.tensors, torch.bfloat16, torch.device("cpu"))
    try:
        target.load(Placement.in_memory(len(target.layers), (1, 4), 2), 8, lambda done, total: None)
        passes = PassRunner(target)
        passes.run(3)
        passes.settle()
        before, held = (
            passes.bytes_transferred,
            [len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd")],
        )
        for tokens in (1, 8, 20) * 10:  # 20 are more than the cache was made for
            passes.run(tokens)
        passes.settle()
        streamed = sum(size for i, size in enumerate(target.layer_bytes) if i not in (1, 4))
        # Padding to whole pages makes the unit slightly larger than the bytes that are read.
        assert 0.95 * 30 * streamed <= passes.bytes_transferred - before <= 30 * streamed
        assert [len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd")] == held
    finally:
        target.close()


@pytest.mark.exhaustive
def test_a_run(tiny_random: Path, run_bench: RunBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.stream.floor._LEAST_SECONDS", 0.0)
    words = ["--shape", "tiny", "--target", str(tiny_random), "--tokens", "16", "1", "--resident", "1"]
    limits = ["--rounds", "2", "--seconds", "0", "--raw-bytes", "1MB", "--raw-threads", "1"]
    ran = run_bench(stream.main, *words, *limits)
    assert ran.code == 0 and set(ran.summary["utilization"]) == {"1", "16"}
    assert (ran.summary["placement"]["device_layers"], ran.summary["placement"]["disk_layers"]) == (1, 5)
    assert [window["tokens"] for window in ran.record["windows"]] == [1, 16, 1, 16]
    floor = ComputeFloor(tiny_random, torch.bfloat16, torch.device("cpu"))
    assert floor.flops_per_row == 2 * SHAPES["tiny"].layers * (3 * 128 * 384 + 3 * 128 * 128)
    assert min(floor.measure(40, 16).to_json().values()) > 0  # a last chunk that is shorter
