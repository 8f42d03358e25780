"""numba, Triton and pinned memory: what works, and every way in which it does not."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import offspec_kernels.backend
import offspec_kernels.row_linear
from offspec.core import memory
from offspec.engine.doctor import numba_loops, pinning, triton_kernels
from offspec.engine.doctor.finding import DoctorOptions, Finding
from offspec.stream import arena
from offspec_planners.hardware_rates import Rate
from offspec_planners.measure import processor


def test_numba_compiles_here() -> None:
    [finding] = numba_loops.check(DoctorOptions())
    assert finding.state == "ok", finding


@pytest.mark.parametrize("missing", ["numba", "offspec_kernels.noise.native"])
def test_numba_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    [finding] = numba_loops.check(DoctorOptions())
    assert finding.state == "failed" and "pip install" in finding.remedy


def test_numba_that_compiles_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    native = SimpleNamespace(native_row=lambda seed, position, size: torch.zeros(size))
    monkeypatch.setitem(sys.modules, "offspec_kernels.noise.native", native)
    [finding] = numba_loops.check(DoctorOptions())
    assert finding.state == "failed" and "results of a compiled loop differ from torch" in finding.found


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """One GPU whose tensors are on the CPU. error: raised by a kernel; wrong: added to its results."""
    gpu: dict[str, Any] = {"error": None, "wrong": 0.0, "backend": "triton"}

    def product(rows: Any, weight: Any, *, path: str) -> Any:
        assert path == "triton"
        if gpu["error"] is not None:
            raise gpu["error"]
        return rows @ weight.T + gpu["wrong"]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch, "device", lambda *name: "cpu")
    monkeypatch.setattr(offspec_kernels.backend, "choose_backend", lambda device: gpu["backend"])
    monkeypatch.setattr(offspec_kernels.row_linear, "row_linear", product)
    return gpu


def triton() -> Finding:
    [finding] = triton_kernels.check(DoctorOptions())
    return finding


@pytest.mark.parametrize(
    ("changed", "state", "words"),
    [
        ({}, "ok", ""),
        ({"wrong": 1.0}, "failed", "returns wrong results"),
        ({"backend": "eager"}, "absent", ""),
    ],
)
def test_a_kernel_that_compiles(gpu: dict[str, Any], changed: dict[str, Any], state: str, words: str) -> None:
    gpu.update(changed)
    assert triton().state == state and words in triton().found


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (RuntimeError("Failed to find C compiler. Please specify via CC"), "apt install gcc"),
        (subprocess.CalledProcessError(1, ["/usr/bin/gcc", "main.c"]), "python3-dev"),
        (RuntimeError("`ptxas` failed with error code 255"), "TRITON_PTXAS_PATH"),
        (AssertionError("libcuda.so cannot found!\nPossible files are located at"), "ldconfig"),
        (OSError(28, "No space left on device"), "TRITON_CACHE_DIR"),
        (ValueError(""), "pip install --force-reinstall torch"),
    ],
)
def test_a_kernel_that_does_not_compile(gpu: dict[str, Any], error: Exception, remedy: str) -> None:
    gpu["error"] = error
    assert triton().state == "failed"
    assert "\n" not in triton().found and type(error).__name__ in triton().found
    assert remedy in triton().remedy


def test_triton_that_is_not_installed(gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offspec_kernels.backend, "has_triton", lambda: False)
    assert triton().state == "failed" and triton().remedy == "pip install triton"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_nothing_is_tried() -> None:
    assert triton().state == "absent"
    [pinned] = pinning.check(DoctorOptions())
    assert pinned.state == "absent"


@pytest.mark.parametrize(
    ("granted", "rate", "states", "words"),
    [
        (True, 25e9, ["ok", "ok"], "25.00 GB/s"),
        (True, 2e9, ["ok", "limited"], "16 lanes"),
        (False, 25e9, ["failed"], "ulimit -l unlimited"),
    ],
)
def test_memory_that_is_pinned_and_copied(
    gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch, granted: bool, rate: float, states: list[str],
    words: str,
) -> None:  # fmt: skip
    sizes = list[int]()

    class Pinned:
        """Fake arena."""

        def __init__(self, nbytes: int, *, pin: bool) -> None:
            self.nbytes, self.pinned = nbytes, pin and granted
            sizes.append(nbytes)

        def close(self) -> None: ...

    monkeypatch.setattr(arena, "Arena", Pinned)
    monkeypatch.setattr(processor, "copy_bandwidth", lambda device: Rate.exactly(rate))
    findings = list(pinning.check(DoctorOptions()))
    assert [finding.state for finding in findings] == states
    assert words in findings[-1].found + findings[-1].remedy
    monkeypatch.setattr(memory, "available_bytes", lambda: 600_000_000)
    next(pinning.check(DoctorOptions()))
    assert sizes[-1] == 300_000_000
