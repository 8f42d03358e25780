"""Kernels compile for real GPUs, without one: they fit into their shared memory and registers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SPILT = 320  # bytes of a thread's 1020 of registers that may lie in memory
KERNELS = {
    *("_tree_attention", "_merge", "_far_keys", "_near_keys"),
    *("_within_blocks", "_across_blocks", "_survey", "_pick", "_move", "_fill"),
    *("_row_linear", "_grouped_linear", "_tree_scan", "_tree_conv"),
}
FORMATS = {"_ggml", "_grouped", "_codebook", "_int8_rows", "_awq", "_gptq", "_compressed", "_float8"}


def _compiled(folder: Path, *words: str) -> dict[str, Any]:
    """The record of a process that compiles, since this one interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    record = folder / "record.json"
    done = subprocess.run(
        [sys.executable, "-m", "bench.kernels.compiled", "--json", record, *words],
        cwd=Path(__file__).parents[2],
        env={**environment, "TRITON_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FP_FUSION" not in done.stderr  # each launch says whether products and sums are fused
    found: dict[str, Any] = json.loads(record.read_text())
    assert found["too_large"] == []
    assert all(one["stack"] <= SPILT for one in found["spills"])
    return found


@pytest.mark.exhaustive
def test_one_call_of_each_operation(tmp_path: Path) -> None:
    found = _compiled(tmp_path, "--quick", "--architectures", "89")
    assert {one["kernel"] for one in found["largest"]} == KERNELS | {"_codebook"}
    assert found["spilt"] == 0


@pytest.mark.slow
def test_every_variant_on_every_gpu(tmp_path: Path) -> None:
    found = _compiled(tmp_path)
    kernels = {(one["architecture"], one["kernel"]) for one in found["largest"]}
    assert kernels == {(gpu, kernel) for gpu in (80, 86, 89, 90, 120) for kernel in KERNELS | FORMATS}
