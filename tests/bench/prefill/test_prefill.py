"""The bench of long prompts, the random models that both benches can run on, and plots without matplotlib."""

from __future__ import annotations

import builtins
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.lib import plots, random_model
from bench.lib.cgroup import BenchError
from bench.lib.random_model import SHAPES
from bench.prefill import __main__ as prefill
from bench.prefill import worker as prefill_worker
from bench.stream.floor import Compute
from offspec.checkpoint import open_checkpoint
from offspec.checkpoint.tensors import on_disk


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model.build(SHAPES["tiny"], tmp_path_factory.mktemp("random") / "tiny")


def test_a_random_model_is_what_its_shape_says(tiny: Path) -> None:
    from transformers import AutoModelForCausalLM

    shape = SHAPES["tiny"]
    model: Any = AutoModelForCausalLM.from_pretrained(tiny)
    assert len(model.model.layers) == shape.layers
    planned = sum(
        random_model.tensor_bytes(entry) for entries in random_model.plan(shape).values() for entry in entries
    )
    assert sum(parameter.nbytes for parameter in model.parameters()) == planned
    assert bool((model.model.layers[2].input_layernorm.weight == 1).all())
    with torch.inference_mode():
        logits = model(torch.tensor([[1, 7, 30]])).logits
    assert bool(logits.isfinite().all())
    assert float(logits.std()) > 0
    checkpoint = open_checkpoint(str(tiny))
    (stored,) = on_disk(checkpoint.tensors["model.layers.3.input_layernorm.weight"])
    assert stored.offset % 4096 == 0


def test_a_model_that_is_there_is_used_again_and_another_is_refused(tiny: Path) -> None:
    file = tiny / random_model.layer_file(0)
    written = file.stat().st_mtime_ns
    assert random_model.build(SHAPES["tiny"], tiny) == tiny
    assert file.stat().st_mtime_ns == written
    with pytest.raises(BenchError, match="another model"):
        random_model.build(replace(SHAPES["tiny"], layers=2), tiny)


def test_a_layer_of_the_70b_shape_has_its_bytes() -> None:
    shape = SHAPES["70b"]
    layer = sum(random_model.tensor_bytes(entry) for entry in shape.layer_entries(0))
    assert 1.70e9 < layer < 1.72e9
    parameters = (80 * layer + sum(random_model.tensor_bytes(e) for e in shape.outer_entries())) / 2
    assert 70.5e9 < parameters < 70.6e9


def test_the_builders_program_prints_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "small"
    assert random_model.main([str(out), "--shape", "tiny", "--layers", "1"]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert random_model.main([str(out), "--shape", "tiny", "--layers", "2"]) == 1
    assert "another model" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["small"]  # nothing half-made stays behind


def found_runs(**changes: Any) -> dict[str, Any]:
    run = {"tokens": 8, "raw_before": 100.0, "raw_after": 300.0, "draft_seconds": 0.0, "bytes": 400}
    return {
        "placement": {"streamed_layers": 3, "head": "device", **changes},
        "runs": [{**run, "seconds": seconds} for seconds in (4.0, 5.0, 9.0)],
    }


def test_prefill_is_judged_by_the_larger_of_trip_and_floor() -> None:
    recipe = {"layer_bytes": 800, "layer_files": ["a"] * 4, "head_bytes": 200}
    row = prefill.tally(found_runs(), {8: Compute(2.0, 1.0, 4.0)}, recipe)[0]
    assert row["trip_bytes"] == 600
    assert row["trip_seconds"] == 3.0
    assert row["ratio"] == pytest.approx(5 / 3)  # the trip is longer than 2 s of GEMM
    assert row["ratio_with_attention"] == pytest.approx(5 / 3)
    assert row["ratio_with_layers"] == pytest.approx(5 / 4)
    with_head = prefill.tally(found_runs(head="disk"), {8: Compute(5.0, 1.0, 9.0)}, recipe)[0]
    assert with_head["trip_seconds"] == 4.0
    assert with_head["ratio"] == 1.0


def test_prefill_end_to_end(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [random_model.layer_file(index) for index in range(SHAPES["tiny"].layers)]
    recipe = {
        "factor": 4,
        "fingerprint": "tiny",
        "layer_files": files,
        "layer_bytes": sum((tiny / name).stat().st_size for name in files),
        "head_bytes": 32768,
    }
    (tiny / "widened.json").write_text(json.dumps(recipe))
    monkeypatch.setattr("bench.stream.floor._LEAST_SECONDS", 0.0)
    monkeypatch.setattr(prefill_worker, "_SETTLE_SECONDS", 0.0)

    def child(module: str, *words: str) -> str:
        if module == "bench.lib.widen":
            return f"{tiny}\n"
        return json.dumps(prefill_worker.work(json.loads(words[1])))

    monkeypatch.setattr(prefill, "child", child)
    monkeypatch.setattr("bench.offload.__main__.child", child)  # which widens
    out = tmp_path / "result.json"
    words = ["--tokens", "40", "24", "--repeats", "2", "--memory", "3GB", "--budget", "8", "--no-cgroup"]
    raw = ["--raw-bytes", "1MB", "--raw-threads", "1", "--draft", "auto"]
    assert prefill.main([*words, *raw, "--json", str(out)]) == 0
    printed = capsys.readouterr().out.splitlines()
    last = json.loads(printed[-1])
    assert printed[0].startswith("ceiling")
    assert last["tokens"] == 40
    assert last["seconds"] > 0
    assert [row["tokens"] for row in last["rows"]["none"]] == [24, 40]
    saved = json.loads(out.read_text())
    assert len(saved["processes"]["none"]["runs"]) == 4
    assert saved["processes"]["none"]["runs"][0]["tree_nodes"] == 1
    assert saved["processes"]["auto"]["runs"][0]["tree_nodes"] > 1
    assert "<svg" in out.with_suffix(".svg").read_text()


def test_without_matplotlib_there_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = builtins.__import__

    def refuse(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return genuine(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert plots.prefill_plot([], "title", tmp_path / "a.svg") == plots.MISSING
    assert not (tmp_path / "a.svg").exists()
