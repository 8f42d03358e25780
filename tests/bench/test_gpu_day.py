"""GPU evaluation at toy sizes: every step succeeds, and a failing step does not affect the others."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.gpu_day import __main__ as gpu_day
from bench.gpu_day import exact
from bench.gpu_day.steps import STEPS, Step
from bench.gpu_day.throttled_link import throttled
from offspec.stream.device_stream import DeviceStream
from tests.support.bench_runs import RunBench

EXHAUSTIVE = pytest.mark.exhaustive


def _run(run_bench: RunBench, tmp_path: Path, *words: str) -> Any:
    return run_bench(gpu_day.main, "--dry", "--models", str(tmp_path / "models"), *words)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param("a", marks=EXHAUSTIVE),
        pytest.param("b", marks=EXHAUSTIVE),
        pytest.param("drafts", marks=pytest.mark.slow),
    ],
)
def test_every_step_ends_well(run_bench: RunBench, tmp_path: Path, smollm2: object, call: str) -> None:
    """Run every step except programs, which have tests of their own, and slow steps that prepare drafts."""
    drafts = ["text", "wide"]
    own = [
        name for name, step in STEPS.items() if step.call == call and not step.work.startswith("programs:")
    ]
    steps = drafts if call == "drafts" else [name for name in own if name not in drafts]
    ran = _run(run_bench, tmp_path, "--steps", *steps)
    assert ran.summary["steps"] == dict.fromkeys(steps, "ok"), ran.record["steps"]
    if call == "b":
        streamed = ran.record["steps"]["large"]["70B nf4 tight 1 GB/s"]
        assert streamed["answers"][0]["bytes_streamed"] > 0 and streamed["placement"]["streamed_layers"] == 8


@pytest.mark.exhaustive
def test_a_step_that_fails_or_hangs_does_not_affect_others(
    run_bench: RunBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "made_up_steps.py").write_text(
        "import time\n"
        "def fails(day):\n    day.found['first'] = 1\n    raise RuntimeError('no such kernel')\n"
        "def hangs(day):\n    day.found['seen'] = 2\n    day.save()\n    time.sleep(600)\n"
        "def works(day):\n    day.found['short'] = 'well'\n"
    )
    (folder / "sitecustomize.py").write_text(
        "from bench.gpu_day import steps\n"
        "class Made(steps.Step):\n"
        "    def load(self):\n        import made_up_steps as made\n        return getattr(made, self.work)\n"
        "steps.STEPS = {name: Made('a', 9, name) for name in ('fails', 'hangs', 'works')}\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))
    steps = {name: Step("a", 5 if name == "hangs" else 20, name) for name in ("fails", "hangs", "works")}
    monkeypatch.setattr(gpu_day, "STEPS", steps)
    ran = _run(run_bench, tmp_path)
    rows = ran.record["steps"]
    assert ran.code == 1 and ran.summary["steps"] == {"fails": "failed", "hangs": "stopped", "works": "ok"}
    assert rows["fails"]["first"] == 1 and "no such kernel" in rows["fails"]["error"]
    assert rows["hangs"]["seen"] == 2 and "made_up_steps" in rows["hangs"]["log"]  # where it was
    skipped = _run(run_bench, tmp_path, "--seconds", "1", "--steps", "fails", "works")
    assert skipped.code == 1 and set(skipped.summary["steps"].values()) == {"skipped"}


@pytest.mark.parametrize(("dtype", "error"), [("float32", 3e-4), ("float16", 2e-3), ("bfloat16", 0.015)])
def test_a_kernel_in_a_lower_precision_is_wrong(dtype: str, error: float) -> None:
    """Products in TF32 have errors of about 3e-4; in float32 an H200 has 3.1e-6."""
    case = {"dtype": f"torch.{dtype}", "differ": [], "error": error}
    right = {**case, "error": min(error / 100, 3.1e-6)}
    rest = {"attention": [], "dequant": {}, "noise": [True]}
    assert exact._wrong({"row_linear": [case, right], **rest}) == [case]
    tree = {**right, "draft_error": error}
    assert exact._wrong({**rest, "row_linear": [], "attention": [tree]}) == [tree]


def test_a_throttled_link_has_two_pieces_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece is sent when the one before the last has arrived; a layer is complete with its last piece."""
    clock, sent = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    def copy(self: object, unit: int, memory: object, slot: int) -> int:
        for number in range(10):
            DeviceStream._send(self, b"", bytes(10**6), number)
        return 10**7

    monkeypatch.setattr(DeviceStream, "_send", lambda *_: sent.append(clock[0]))
    monkeypatch.setattr(DeviceStream, "_copy", copy)
    time = SimpleNamespace(perf_counter=lambda: clock[0], sleep=sleep)
    monkeypatch.setattr("bench.gpu_day.throttled_link.time", time)
    with throttled(1e9):
        assert DeviceStream._copy(None, 0, None, 0) == 10**7
    assert sent == pytest.approx([0.0, *(number * 1e-3 for number in range(9))], abs=2e-4)
    assert clock[0] == pytest.approx(10e-3, abs=2e-4) and DeviceStream._copy is copy
