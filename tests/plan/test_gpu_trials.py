"""Benchmarks of a target on a GPU: waiting for the device, and measured costs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from offspec.plan.measure_target import PassBenchmark
from offspec.stream.arena import Arena
from offspec_kernels.tree_attention import triton_exact
from offspec_planners.placement import Placement
from tests.support.simulated_cuda.late import late as late
from tests.support.tiny_models import CALIBRATION, tiny_engine, write_model

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
LAYERS, CAPACITY = 5, 256 + 64
RESIDENT = Placement.in_memory(LAYERS, range(LAYERS), 0)


def test_benchmark_waits_for_layers_and_not_for_copies(late: Any, tmp_path: Path) -> None:
    """Copies of later layers overlap in real passes too: their time is not part of the previous layer."""
    model = write_model(tmp_path / "model", num_hidden_layers=LAYERS)
    whole = list[bool]()

    def look() -> None:
        whole.append(torch.cuda.current_stream(CUDA).query())

    with tiny_engine(model, "none", budget=64, placement=RESIDENT, device=CUDA) as engine:
        trial = PassBenchmark(engine._assembly.target, CALIBRATION, CAPACITY, check_contention=look)
        engine._assembly.target.tree_model.check_cancelled = look
        source, aside = Arena(4096, pin=True), torch.cuda.Stream(CUDA)
        with torch.cuda.stream(aside):
            target = source.tensor.to(CUDA, non_blocking=True)
            copied = aside.record_event()
        with torch.no_grad():
            trial._one(2, 100.0)
        assert not copied.query(), "a copy in another stream was waited for"
        assert len(whole) == LAYERS and all(whole[1:]), "a layer was still to be computed"
        assert torch.cuda.current_stream(CUDA).query(), "what follows the layers was still to be computed"
        copied.synchronize()
        del target
        source.close()


def test_benchmark_includes_the_kernel_of_distant_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first 256 keys of a row are processed one by one; those of a longer text in blocks."""
    model = write_model(tmp_path / "model", num_hidden_layers=LAYERS)
    launched, kernel = list[tuple[int, ...]](), triton_exact._far_keys

    class RecordedLaunches:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            launched.append(grid)
            return kernel[grid]

    monkeypatch.setattr(triton_exact, "_far_keys", RecordedLaunches())
    with tiny_engine(model, "none", budget=64, placement=RESIDENT, device=CUDA, context=1024) as engine:
        trial, layers = PassBenchmark(engine._assembly.target, CALIBRATION, 1024 + 64), len(RESIDENT.tiers)
        for rows in (1, 2, 64):
            launched.clear()
            with torch.no_grad():
                trial._one(rows, 100.0)
            assert len(launched) == layers, f"one launch a layer for passes of {rows} rows"
