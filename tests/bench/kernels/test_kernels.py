"""Kernel benches at tiny sizes: wrong kernels are not timed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.kernels import __main__ as kernels
from bench.kernels import dequant, graphs, timing
from bench.kernels.cases import OURS, parse_spec
from bench.kernels.timing import Rates
from bench.lib.cgroup import BenchError
from offspec_kernels.backend import Backend
from offspec_kernels.dequant.ggml import Ggml
from tests.support.bench_runs import RunBench
from tests.support.exhaustive import sampled_params
from tests.support.kernel_device import device_of
from tests.support.tiny_models import write_model

CPU = torch.device("cpu")
TINY = (
    "tree_attention:30,7,4,2,16",
    "tree_scan:5,2,1,8,10",
    "tree_conv:5,20,3",
    "kv_compact:2,2,50,16,5",
    "gumbel_argmax:6,300",
    "topk_children:3,300,4:float32",
    "gumbel_noise:2,300:float32",
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = Rates({"float32": 1e12, "bfloat16": 2e12}, 1e9)
    monkeypatch.setattr(kernels, "measure_rates", lambda device, dtypes: rates)
    monkeypatch.setattr(timing, "_TURNS", 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", sampled_params(["eager", "triton"], "eager"))
def test_every_operation_prints_its_ceiling_first(path: Backend, run_bench: RunBench) -> None:
    where = ("--device", device_of(path).type, "--path", path)
    ran = run_bench(kernels.main, "--seconds", "0", *where, "--shapes", *TINY)
    assert ran.code == 0 and ran.record | ran.summary == ran.record
    heads = [line.split()[0] for line in ran.lines if line.startswith(("ceiling", "reached"))]
    assert heads == ["ceiling", *["ceiling", "reached"] * len(TINY)]
    for text, row in zip(TINY, ran.summary["cases"], strict=True):
        assert row["case"] == str(parse_spec(text, kernels.OPS)) and row["path"] == path
        assert row["right"] and row["checked"]["passed"] and not row["failed"] and row["speedup"]
        assert row["of_ceiling"] == pytest.approx(row["ceiling_seconds"] / row["ways"][OURS]["seconds"])


def test_dequantization_is_checked_and_reported(run_bench: RunBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequant, "memory_bandwidth", lambda device: SimpleNamespace(high=1e10))
    monkeypatch.setattr(dequant, "_COPIES_BYTES", 1 << 20)
    before = torch.get_num_threads()
    words = ["--rows", "256", "--columns", "256", "--seconds", "0", "--threads", "1", "2"]
    ran = run_bench(dequant.main, *words, "--formats", "nf4", "Q4_K")
    assert ran.code == 0 and torch.get_num_threads() == before
    assert [run["threads"] for run in ran.summary["formats"][0]["runs"]] == [1, 2]
    assert ran.summary["formats"][1]["bits_per_weight"] == 4.5
    monkeypatch.setattr(Ggml, "reference", lambda self, parts, shape: torch.zeros(shape))
    assert dequant.main(["--formats", "Q4_K"]) == BenchError.exit_code


@pytest.mark.exhaustive
def test_draft_steps_are_compared_at_every_width(tmp_path: Path) -> None:
    rows = graphs.measure_graphs(str(write_model(tmp_path / "model")), CPU, (2, 5), rounds=1)
    assert [row["width"] for row in rows] == [2, 5] and all(row["gain"] > 0 for row in rows)
