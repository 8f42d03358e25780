"""Kernels compile for real GPUs, without one: they fit into their shared memory and registers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Bytes of shared memory a program can have, by compute capability: A100; RTX 4090; H100; RTX 5090.
SHARED = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
SPILT = 320  # bytes of a thread's 1020 of registers that may lie in memory


def _compiled(folder: Path, *words: str) -> list[dict[str, Any]]:
    """What a process that compiles, since this one interprets, says of each kernel."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiling", *words],
        cwd=Path(__file__).parents[2],
        env={**environment, "TRITON_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def _check(found: list[dict[str, Any]]) -> None:
    assert {each["kernel"] for each in found} == {
        *("_tree_attention", "_merge", "_far_keys", "_near_keys"),
        *("_within_blocks", "_across_blocks", "_survey", "_pick", "_move", "_fill"),
        "_ggml",
        *("_row_linear", "_tree_scan", "_tree_conv"),
        *("_grouped", "_codebook", "_int8_rows"),
        *("_awq", "_gptq", "_compressed", "_float8"),
    }
    for each in found:
        assert each["shared"] <= SHARED[each["architecture"]], each
        assert each["stack"] <= SPILT, each
        assert each["fused_float64"] == 0, each  # noise has the bits that torch's has


@pytest.mark.exhaustive
def test_on_a_consumers_gpu(tmp_path: Path) -> None:
    _check(_compiled(tmp_path, "89"))


@pytest.mark.slow
def test_every_shape_on_every_gpu(tmp_path: Path) -> None:
    _check(_compiled(tmp_path, "--all", *map(str, SHARED)))
