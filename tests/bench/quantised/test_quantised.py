"""The bench of NF4 beside bfloat16: its arithmetic, its floors on a tiny pack, and scripted runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.lib.cgroup import BenchError
from bench.quantised import __main__ as quantised
from bench.quantised import floor as quantised_floor
from bench.quantised import tally as quantised_tally
from bench.quantised import worker as quantised_worker
from bench.quantised.tally import BF16, NF4
from bench.stream.floor import Compute
from bench.stream.window import Reading, Window
from offspec.model.quantize.pack import pack_model
from offspec_planners.measure import Bandwidth
from tests.support.bench_runs import RunBench

RECIPE = {"factor": 4, "fingerprint": "f", "layer_bytes": 4000, "layer_files": ["layer"]}


def window(seconds: float, nbytes: float = 1000.0, link: float = 1.0, tokens: int = 1) -> dict[str, Any]:
    return {"tokens": tokens, "passes": 2, "seconds": seconds, "bytes": nbytes, "link_seconds": link}


def floor(unpacking: float, gemm: float, together: float = 9.0) -> dict[str, Any]:
    by_rows = {"gemm_seconds": gemm, "together_seconds": together, "layers_seconds": 3.0}
    return {"unpacking_seconds": unpacking, "unpacked_bytes": 1100, "by_rows": {"2": by_rows, "64": by_rows}}


def test_a_pass_is_bound_by_the_link_or_by_unpacking_and_products() -> None:
    found = quantised_tally.judged(window(4.0), floor(1.0, 2.0), floor(3.0, 2.0, 7.0), packed=True)
    assert (found["unpacking_seconds"], found["gemm_seconds"], found["bound_seconds"]) == (2.0, 2.0, 4.0)
    assert (found["over_bound"], found["over_together"]) == (1.0, 0.5)
    slow = quantised_tally.judged(window(6.0, link=5.0), floor(1.0, 2.0), floor(1.0, 2.0), packed=True)
    assert slow["over_bound"] == pytest.approx(1.2)
    plain = quantised_tally.judged(window(4.0), floor(1.0, 2.0), floor(1.0, 2.0), packed=False)
    assert (plain["unpacking_seconds"], plain["bound_seconds"]) == (0.0, 2.0)


def test_passes_are_medians_side_by_side() -> None:
    def judged(kind: str, seconds: float, nbytes: float) -> dict[str, Any]:
        both = floor(0.5, 0.5), floor(0.5, 0.5)
        return quantised_tally.judged(window(seconds, nbytes), *both, packed=kind == NF4)

    windows = {
        BF16: [judged(BF16, seconds, 4000.0) for seconds in (4.0, 3.0, 90.0)],
        NF4: [judged(NF4, seconds, 1000.0) for seconds in (1.0, 1.0, 8.0)],
    }
    (row,) = quantised_tally.passes(windows)
    assert (row["tokens"], row["bytes_ratio"], row["speed_up"]) == (1, 4.0, 4.0)
    assert row[NF4]["over_bound"] == 1.0
    assert quantised_tally.shortfalls([row], None) == []


def test_what_falls_short_is_told() -> None:
    row = {"tokens": 64, "bytes_ratio": 3.2, NF4: {"over_bound": 1.16}}
    told = quantised_tally.shortfalls([row], {"first_differences": {"nf4, as given, chat-1": 3}})
    assert all(word in sentence for word, sentence in zip(("3.20", "1.16", "chat-1"), told, strict=True))


def answer(tokens: int, seconds: float, ids: list[int] | None = None) -> dict[str, Any]:
    return {
        "id": "chat-1",
        "tokens": tokens,
        "passes": tokens // 2,
        "seconds": seconds,
        "draft_seconds": 0.5,
        "bytes_streamed": 100 * tokens,
        "token_ids": ids or list(range(tokens)),
        "finish_reason": "length",
    }


def test_speeds_and_answers_that_speculation_changed() -> None:
    runs = [
        {"kind": kind, "way": way, "answers": [answer(4, seconds, ids)]}
        for kind, way, seconds, ids in (
            (BF16, "off", 9.0, None),
            (BF16, "given", 4.0, None),
            (BF16, "planned", 2.0, None),
            (NF4, "off", 9.0, None),
            (NF4, "given", 1.0, [0, 1, 7, 8]),
            (NF4, "planned", 1.0, None),
        )
    ]
    found = quantised_tally.speeds(runs, ("given", "planned"), "off")
    assert found["ways"]["given"]["gain"] == 4.0
    assert found["ways"]["planned"][BF16]["tokens_per_pass"] == 2.0
    assert (found["fastest_tokens_per_s"], found["fastest_gain"]) == ({BF16: 2.0, NF4: 4.0}, 2.0)
    assert found["first_differences"] == {"nf4, given, chat-1": 2}


def test_worker_s_figures_are_of_a_pass() -> None:
    reading = Reading(100.0, Compute(0.0, 0.0, 0.0))
    found = quantised_worker.figures(Window(8, 4, 2.0, 800, 1.0, reading, reading))
    assert (found["seconds"], found["bytes"], found["link_seconds"]) == (0.5, 200.0, 2.0)


@pytest.fixture(scope="module")
def folders(tiny_random: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pack = tmp_path_factory.mktemp("quantised") / "packed"
    pack_model(str(tiny_random), "nf4", out=pack)
    return {BF16: tiny_random, NF4: pack}


def test_floors_of_a_tiny_pack(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised_floor, "_LEAST_SECONDS", 0.0)
    unpacking = quantised_floor.Unpacking(folders[NF4], torch.bfloat16)
    layers = list(folders[NF4].glob("*.safetensors"))
    assert 0 < unpacking.nbytes < sum(file.stat().st_size for file in layers)
    assert unpacking.seconds() > 0
    assert unpacking.seconds(rows=3) > 0
    with pytest.raises(BenchError, match="no packed weights"):
        quantised_floor.Unpacking(folders[BF16], torch.bfloat16)


@pytest.mark.exhaustive
def test_worker_streams_a_tiny_pack(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.stream import target
    from offspec_planners.placement import Placement

    real = target.load

    def streamed(args: argparse.Namespace, folder: Path, vram: None) -> tuple[Any, Placement]:
        return real(argparse.Namespace(**{**vars(args), "resident": 0, "slots": 2}), folder, vram)

    monkeypatch.setattr(target, "load", streamed)
    job = {"memory": 1 << 34, "dtype": "bfloat16", "tokens": [1, 4], "seconds": 0.0, "raw_bytes": 1 << 20}
    nbytes = {}
    for kind, folder in folders.items():
        found = quantised_worker.work({**job, "model": str(folder)})
        assert [one["tokens"] for one in found["windows"]] == [1, 4]
        nbytes[kind] = found["windows"][0]["bytes"]
    assert nbytes[BF16] > 2 * nbytes[NF4] > 0


@pytest.mark.parametrize("slow", [False, True])
def test_a_run(slow: bool, tmp_path: Path, run_bench: RunBench, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "widened.json").write_text(json.dumps(RECIPE))
    order: list[str] = []

    def windows(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
        packed = folder.name == "pack"
        order.append(NF4 if packed else BF16)
        seconds = 4.0 if packed and slow else 2.0 if packed else 6.0
        return {"windows": [window(seconds, 1000.0 if packed else 4000.0, tokens=t) for t in args.tokens]}

    def answers(args: Any, folder: Path, group: Any, temperature: float, on: bool) -> dict[str, Any]:
        assert args.tokens == 48
        order.append(f"{args.budget} {on}")
        return {"answers": [answer(8, 1.0 if folder.name == "pack" else 3.0)]}

    monkeypatch.setattr(quantised, "widened", lambda args: tmp_path)
    monkeypatch.setattr(quantised, "pack_of", lambda folder: str(tmp_path / "pack"))
    monkeypatch.setattr(quantised, "raw_bandwidth", lambda *args: Bandwidth(1000, 1.0, True))
    monkeypatch.setattr(quantised, "read_floor", lambda *args: floor(1.0, 1.0))
    monkeypatch.setattr(quantised, "run_windows", windows)
    monkeypatch.setattr(quantised, "ask", answers)
    ran = run_bench(quantised.main, "--rounds", "2", "--prompts", "1", "--no-cgroup")
    assert ran.code == int(slow)
    assert [row["tokens"] for row in ran.summary["passes"]] == [1, 64]
    assert ran.summary["passes"][0]["bytes_ratio"] == 4.0
    assert ran.summary["answers"]["fastest_gain"] == 3.0
    assert order[:4] == [BF16, NF4, NF4, BF16]  # in turns
    assert order[4:] == ["256 False"] * 2 + ["256 True"] * 2 + ["None True"] * 2
