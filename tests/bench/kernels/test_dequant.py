"""The dequantisation bench: its cases, its arithmetic, and the program on a small matrix."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from bench.kernels import dequant
from bench.kernels.dequant import FORMATS, packed_bytes, random_parts
from bench.lib.cgroup import BenchError
from offspec_kernels.dequant.ggml.layout import LAYOUTS
from offspec_kernels.dequant.grouped import Grouped
from tests.support.bench_runs import RunBench

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", FORMATS)
def test_random_weights_are_weights_of_their_format(name: str) -> None:
    shape = (128, 256)
    parts = random_parts(FORMATS[name], shape, CPU)
    values = FORMATS[name].reference(parts, shape)
    assert values.shape == shape
    assert values.isfinite().all()
    assert len(values.unique()) > 3
    assert packed_bytes(parts) == sum(part.nbytes for part in parts.values())


def test_all_types_of_gguf_files_are_timed() -> None:
    assert set(LAYOUTS) <= FORMATS.keys()


@dataclass(frozen=True, slots=True)
class Wrong(Grouped):
    """Writes something else than its reference has."""

    def eager(self, parts: object, shape: object, out: Tensor) -> None:
        out.fill_(1)


def test_nothing_is_timed_that_is_wrong() -> None:
    dequant.check("int4-g64", FORMATS["int4-g64"], CPU)
    with pytest.raises(BenchError, match="wrong does not give what its reference gives"):
        dequant.check("wrong", Wrong(4), CPU)


def test_the_bound_is_the_slower_of_writing_and_reading() -> None:
    shape = (256, 512)
    written, read = 2 * 256 * 512, packed_bytes(random_parts(FORMATS["Q8_0"], shape, CPU))
    for ceiling, seconds in (
        ({"write_bytes_per_s": 1e6, "read_bytes_per_s": 1e9}, written / 1e6),
        ({"write_bytes_per_s": 1e9, "read_bytes_per_s": 1e6}, read / 1e6),
    ):
        row = dequant.measure("Q8_0", shape, CPU, ceiling, 0.0)
        assert row["floor_seconds"] == pytest.approx(seconds)
        assert row["ratio"] == pytest.approx(seconds / row["seconds"])
        assert row["packed_bytes_per_s"] == pytest.approx(read / row["seconds"])


def test_what_one_core_does_too_slowly_is_named() -> None:
    def row(name: str, threads: int, rate: float) -> dict[str, object]:
        return {"format": name, "runs": [{"threads": threads, "packed_bytes_per_s": rate}]}

    rows = [row("slow", 1, 1.9e9), row("fast", 1, 2.1e9), row("slow on two", 2, 1.9e9)]
    assert dequant.below_aim({"formats": rows}) == ["slow"]


@pytest.mark.exhaustive
def test_a_run(run_bench: RunBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequant, "memory_bandwidth", lambda device: SimpleNamespace(high=1e10))
    monkeypatch.setattr(dequant, "_COPIES_BYTES", 1 << 20)
    before = torch.get_num_threads()
    words = ["--rows", "256", "--columns", "256", "--seconds", "0", "--threads", "1", "2"]
    ran = run_bench(dequant.main, *words, "--formats", "nf4", "Q4_K")
    assert ran.code == 0 and torch.get_num_threads() == before
    assert [row["format"] for row in ran.summary["formats"]] == ["nf4", "Q4_K"]
    assert [run["threads"] for run in ran.summary["formats"][0]["runs"]] == [1, 2]
    assert ran.summary["formats"][1]["bits_per_weight"] == 4.5
