"""Doctor: the demo model's answer is equal on all devices; a difference is reported with its position."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from offspec.checkpoint import open as opening
from offspec.core.errors import CapacityError, ModelNotFoundError, StreamError
from offspec.core.events import Event, Mismatch, Notice, Result
from offspec.engine import load as loading
from offspec.engine.doctor import sample_run
from offspec.engine.doctor.finding import DoctorOptions, Finding

RESULT = Result(
    text="a b c",
    token_ids=(5, 6, 7),
    passes=2,
    seconds=1.0,
    ttft_s=0.1,
    bytes_streamed=10**8,
    peak_memory_bytes=10**9,
    finish_reason="length",
    draft="lookup",
    budget=8,
    seed=0,
    draft_seconds=0.1,
    target_seconds=0.5,
    mismatches=(),
)


@dataclass
class Devices:
    """Simulated loads: answers or errors by device, the limits used, and the sufficient limits."""

    results: dict[str, Result | Exception] = field(default_factory=lambda: {"cpu": RESULT, "cuda:0": RESULT})
    least: int = 0
    limits: list[int] = field(default_factory=list)

    def load(self, config: Any, notify: Callable[[Event], None]) -> Any:
        limit = config.memory if config.device == "cpu" else config.vram
        self.limits.append(limit)
        if limit < self.least:
            raise CapacityError("too little", needed=self.least, given=limit)
        notify(Notice("a notice"))

        def generate(prompt: str, params: Any, *, check: bool) -> Result:
            result = self.results[config.device]
            assert check
            if isinstance(result, Exception):
                raise result
            return result

        engine = MagicMock()
        engine.__enter__.return_value.generate = generate
        return engine


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    devices = Devices()
    monkeypatch.setattr(opening, "embedded_model", lambda: None)
    monkeypatch.setattr(loading, "load", devices.load)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return devices


def found() -> list[Finding]:
    return list(sample_run.check(DoctorOptions()))


def test_the_same_tokens_on_both(devices: Devices) -> None:
    devices.least = 1000
    cpu, gpu = found()
    assert (cpu.state, gpu.state) == ("ok", "ok")
    assert devices.limits == [1, 1050, 1, 1050]  # the least, so that layers stream
    assert cpu.figures["ids"] == "5 6 7" and gpu.figures["notices"] == "a notice"


@pytest.mark.parametrize(
    ("result", "told"),
    [
        ({"token_ids": (5, 9, 7)}, "token 1 differs from the CPU's"),
        ({"token_ids": (5, 6)}, "token 2 differs from the CPU's"),
        ({"mismatches": (Mismatch(2, 7, 8, 0.5),)}, "token 2 differs from plain decoding"),
    ],
)
def test_a_gpu_with_other_tokens(devices: Devices, result: dict[str, Any], told: str) -> None:
    devices.results["cuda:0"] = replace(RESULT, **result)
    cpu, gpu = found()
    assert (cpu.state, gpu.state) == ("ok", "failed") and told in gpu.found


def test_errors_in_one_line(devices: Devices) -> None:
    devices.results["cuda:0"] = RuntimeError("CUDA error: out of\nresources")
    cpu, gpu = found()
    assert (cpu.state, gpu.state) == ("ok", "failed")
    assert gpu.found == "RuntimeError: CUDA error: out of"
    devices.results["cpu"] = StreamError("read failed", file="a", offset=1)
    [cpu] = found()  # there is nothing to compare with
    assert (cpu.state, cpu.found) == ("failed", "read failed (a, offset 1)")


def test_without_the_embedded_model(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ModelNotFoundError(f"the demo model is not installed: {opening.DEMO_INSTALL}")

    monkeypatch.setattr(opening, "embedded_model", missing)
    [finding] = found()
    assert (finding.state, finding.remedy) == ("absent", opening.DEMO_INSTALL)
