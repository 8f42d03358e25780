"""The benches of the link and of long prompts: their arithmetic, and both of them on tiny random models."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.lib import plots, random_model
from bench.lib.random_model import SHAPES
from bench.lib.report import Report
from bench.stream import __main__ as stream
from bench.stream import cuda as stream_cuda
from bench.stream.endurance import ALLOWED_GROWTH, endure, judge
from bench.stream.floor import Compute, Floor
from bench.stream.window import Passes, Reading, Window, run_window, summarise
from offspec.checkpoint import open_checkpoint
from offspec.model.loaded import LoadedModel
from offspec_planners.measure import RawDisk
from offspec_planners.placement import Placement
from tests.support.bench_runs import RunBench

CPU = torch.device("cpu")


def reading(link: float, gemm: float = 1.0, attention: float = 0.5, layers: float = 2.0) -> Reading:
    return Reading(link, Compute(gemm, attention, layers))


def test_a_window_is_judged_by_the_readings_on_both_sides() -> None:
    link_bound = Window(64, 4, 10.0, 1800, 5.0, reading(150.0), reading(250.0))
    assert link_bound.link == 200.0
    assert link_bound.utilisation == pytest.approx(0.9)
    assert link_bound.of_bound() == pytest.approx(0.9)  # 9 s of link over 4 s of GEMM
    compute_bound = Window(
        64, 4, 10.0, 1000, 0.0, reading(200.0, 1.0, 1.0, 2.0), reading(200.0, 3.0, 1.0, 3.0)
    )
    assert compute_bound.utilisation == pytest.approx(0.5)
    assert compute_bound.of_bound() == pytest.approx(0.8)
    assert compute_bound.of_bound(attention=True) == pytest.approx(1.2)
    assert compute_bound.of_bound(layers=True) == pytest.approx(1.0)


def test_summaries_are_medians_of_a_pass() -> None:
    windows = [
        Window(8, passes, seconds, 100, 0.0, reading(100.0), reading(100.0))
        for passes, seconds in ((2, 2.0), (2, 4.0), (4, 20.0))
    ]
    row = summarise(windows)
    assert (row["tokens"], row["windows"], row["passes"]) == (8, 3, 8)
    assert row["seconds"] == 2.0
    assert row["spread"]["seconds"] == [1.0, 5.0]
    assert row["utilisation"] == 0.25
    assert row["pooled_utilisation"] == pytest.approx(3 / 26)
    assert json.loads(json.dumps(row)) == row


class ScriptedPasses:
    """Counts what a window asks for; a pass moves 10 bytes and ends a second of its own clock."""

    def __init__(self) -> None:
        self.moved, self.waited = 7, 0.0
        self.log: list[str] = []

    def run(self, tokens: int) -> None:
        self.log.append("pass")
        self.moved += 10
        self.waited += 0.5

    def settle(self) -> None:
        self.log.append("settle")
        self.moved += 3  # read ahead, in no window


def test_the_pass_before_a_window_and_reading_ahead_do_not_count() -> None:
    passes: Any = ScriptedPasses()

    def read_link() -> float:
        passes.log.append("link")
        return 100.0

    def floor(tokens: int) -> Compute:
        passes.log.append(f"floor {tokens}")
        return Compute(1.0, 0.5, 2.0)

    window = run_window(passes, 16, 0.0, read_link, floor)
    around = ["floor 16", "settle", "link", "link"], ["settle", "link", "floor 16"]
    assert passes.log == [*around[0], "pass", "pass", "pass", *around[1]]
    assert (window.passes, window.nbytes, window.waited) == (2, 20, 1.0)
    assert window.seconds > 0


def opened(tiny_random: Path) -> LoadedModel:
    checkpoint = open_checkpoint(str(tiny_random))
    return LoadedModel(checkpoint.folder, checkpoint.tensors, torch.bfloat16, CPU)


def test_passes_move_every_streamed_layer_once_each(tiny_random: Path) -> None:
    target = opened(tiny_random)
    try:
        target.load(Placement.in_memory(len(target.layers), (1, 4), 2), 8, lambda done, total: None)
        passes = Passes(target)
        passes.run(3)
        passes.settle()
        before = passes.moved
        for tokens in (1, 8, 20):  # 20 are more than the cache was made for
            passes.run(tokens)
        assert target.tree_model.cache.rows[0].filled == 0
        passes.settle()
        streamed = [size for i, size in enumerate(target.layer_bytes) if i not in (1, 4)]
        # A reader brings the bytes that exist, which padding to whole pages exceeds by a little.
        assert 0.95 * 3 * sum(streamed) <= passes.moved - before <= 3 * sum(streamed)
    finally:
        target.close()


def test_raw_readings_go_round_the_files(tmp_path: Path) -> None:
    files = [tmp_path / name for name in "abc"]
    for file in files:
        file.write_bytes(bytes(8192))
    raw = RawDisk(files, 8192, (1, 4096))
    starts = []
    for _ in range(4):
        starts.append(raw._at // 8192 % 3)
        assert raw.read() > 0
    assert starts == [0, 1, 2, 0]
    assert len(raw.readings) == 4
    assert raw.sweep_json() == {}
    swept = RawDisk(files, 8192)
    assert (swept.threads, swept.block) in swept.sweep
    assert swept.sweep[swept.threads, swept.block] == max(swept.sweep.values())


@pytest.mark.exhaustive
def test_the_floor_counts_the_products_of_every_layer(tiny_random: Path) -> None:
    shape = SHAPES["tiny"]
    floor = Floor(tiny_random, torch.bfloat16, CPU)
    matrices = [e for e in random_model.plan(shape)[random_model.layer_file(0)] if len(e[2]) == 2]
    assert floor.flops_per_row == shape.layers * sum(random_model.tensor_bytes(e) for e in matrices)
    found = floor.measure(8)
    assert min(found.gemm, found.attention, found.layers) > 0
    assert found.mean(Compute(0, 0, 0)).gemm == pytest.approx(found.gemm / 2)
    chunked = floor.measure(40, 16)  # a last chunk that is shorter
    assert min(asdict(chunked).values()) > 0


def test_growth_is_judged() -> None:
    before = {"resident_bytes": 100, "threads": 4, "descriptors": 9}
    assert judge(10, before, {**before, "resident_bytes": 50})["passed"]
    for name, value in (("resident_bytes", 101 + ALLOWED_GROWTH), ("threads", 5), ("descriptors", 10)):
        assert not judge(10, before, {**before, name: value})["passed"]


def test_nothing_grows_over_some_passes() -> None:
    found = endure(60, warm_up=20)
    assert found["growth"]["threads"] == found["growth"]["descriptors"] == 0
    assert found["passed"]


SETTINGS = ["--resident", "1", "--rounds", "2", "--seconds", "0", "--raw-bytes", "1MB", "--raw-threads", "1"]


@pytest.mark.exhaustive
def test_a_run(tiny_random: Path, run_bench: RunBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.stream.floor._LEAST_SECONDS", 0.0)
    words = ["--shape", "tiny", "--target", str(tiny_random), "--tokens", "16", "1", "--endurance", "20"]
    ran = run_bench(stream.main, *words, *SETTINGS)
    last = ran.summary
    assert ran.code == (0 if last["endurance"]["passed"] else 1)
    assert set(last["utilisation"]) == set(last["of_bound"]) == {"1", "16"}
    assert all(value > 0 for value in last["utilisation"].values())
    assert (last["placement"]["device_layers"], last["placement"]["disk_layers"]) == (1, 5)
    assert [window["tokens"] for window in ran.record["windows"]] == [1, 16, 1, 16]
    assert "<svg" in ran.plot.read_text()


@pytest.mark.exhaustive
def test_the_gpus_bench_goes_through_every_limit(tiny_random: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the device itself: the passes run on the processor, the copy rate is made up."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(stream_cuda, "copy_bandwidth", lambda: SimpleNamespace(high=1e9))
    monkeypatch.setattr("bench.stream.floor._LEAST_SECONDS", 0.0)
    args = argparse.Namespace(
        device="cpu", dtype="bfloat16", vram=["8GB", "12GB"], tokens=[1, 8], rounds=1, seconds=0.0
    )
    asked: list[str | None] = []

    def load(args: object, folder: Path, vram: str | None) -> tuple[LoadedModel, Placement]:
        asked.append(vram)
        target, placement = opened(folder), Placement.in_memory(SHAPES["tiny"].layers, (0,), 2)
        target.load(placement, 8, lambda done, total: None)
        return target, placement

    monkeypatch.setattr(stream_cuda, "load", load)
    found = stream_cuda.measure_cuda(args, tiny_random, Report())
    assert asked == ["8GB", "12GB"]
    assert found["link_bytes_per_s"] == 1e9
    tokens = {vram: set(by) for vram, by in found["utilisation"].items()}
    assert tokens == {"8GB": {"1", "8"}, "12GB": {"1", "8"}}
    assert [window["vram"] for window in found["windows"]] == ["8GB", "8GB", "12GB", "12GB"]
    json.dumps(found)


def test_a_plot_is_the_same_file_each_time(tmp_path: Path) -> None:
    rows = [
        summarise([Window(tokens, 2, 2.0, 100, 0.0, reading(100.0), reading(100.0))]) for tokens in (1, 64)
    ]
    for name in ("a", "b"):
        said = plots.stream_plot({"x4": rows, "x8": rows}, tmp_path / f"{name}.svg")
        assert said.endswith(f"{name}.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
