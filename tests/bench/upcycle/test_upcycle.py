"""The upcycle bench: a small run of its own, made-up answers, and a scripted llama.cpp."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from bench.upcycle import __main__ as upcycle
from bench.upcycle import jobs, tally, worker
from bench.upcycle.tally import LARGE, LLAMA, OFF, PRICED, STREAMED
from offspec_planners.measure import Bandwidth
from offspec_planners.placement import Placement
from tests.support.bench_runs import RunBench
from tests.support.expert_models import by_need


def one_pass(seconds: float, emitted: int = 1, **more: Any) -> dict[str, Any]:
    half = {"draft_seconds": seconds / 2, "target_seconds": seconds / 2}
    return {"emitted": emitted, "tree_nodes": emitted, "bytes_streamed": 100, **half, **more}


def run_of(way: str, *passes: dict[str, Any], settings: str = "") -> dict[str, Any]:
    answer = {"id": "chat-1", "ttft_s": 1.0, "per_pass": list(passes)}
    about = {"way": way, "settings": settings, "raw_bytes_per_s": 50.0, "load_seconds": 2.0}
    return {**about, "answers": [answer]}


FIRST = one_pass(9.0, experts_asked=4, experts_read=4, calls=[[0, 1], [2, 3]], slots=2, kept=[2, 3])


def test_figures_are_those_behind_the_first_pass() -> None:
    later = [
        one_pass(1.0, 3, experts_asked=2, experts_read=1, calls=[[0, 2]]),
        one_pass(1.0, 1, experts_asked=1, experts_read=1, calls=[[2]]),
    ]
    found = tally.figures([run_of(PRICED, FIRST, *later)], expert_bytes=20)
    assert (found["tokens_per_s"], found["tokens_per_pass"], found["bytes_per_token"]) == (2.0, 2.0, 50.0)
    assert found["hit_rate"] == pytest.approx(1 / 3)
    assert found["best_hit_rate"] == pytest.approx(2 / 3)  # 2 could have stayed
    assert found["disk_tokens_per_s"] == pytest.approx(4 / (200 / 50.0))
    assert found["missed_bytes_per_token"] == 10.0
    assert found["of_link"] == pytest.approx((2 * 20 / 50) / 2.0)
    assert (found["slots"], found["ttft_s"]) == (2, 1.0)


def test_of_llama_s_settings_the_fastest_counts() -> None:
    slow, fast = one_pass(4.0), one_pass(2.0)
    runs = [run_of(LLAMA, slow, slow, settings="2"), run_of(LLAMA, fast, fast, settings="1")]
    failed = {"way": LLAMA, "settings": "3", "raw_bytes_per_s": 50.0, "error": "it was killed"}
    assert tally.fastest([*runs, failed]) == [runs[1]]
    assert tally.figures(tally.fastest([failed]), 1) == {"error": "it was killed"}


def test_aims() -> None:
    speeds = {STREAMED: 1.0, OFF: 2.0, LARGE: 1.5, PRICED: 2.4, LLAMA: 2.0}
    ways = {name: {"tokens_per_s": speed, "of_link": 0.95} for name, speed in speeds.items()}
    found = tally.ratios(ways)
    assert found == {
        "priced_over_better": 1.2,
        "priced_over_streamed": 2.4,
        "off_of_link": 0.95,
        "over_llama_cpp": 1.2,
    }
    assert len(tally.shortfalls(found, 16, 0.0)) == 1  # llama.cpp
    assert len(tally.shortfalls(found, 16, 1.0)) == 2  # 1.3 is wanted of skewed routers
    assert len(tally.shortfalls(found, 32, 1.0)) == 1
    assert tally.ratios({OFF: {"error": "killed"}}) == {}


def test_the_ceiling_is_the_missed_experts_bytes() -> None:
    ceiling = tally.Ceiling(bandwidth=600.0, expert_bytes=10, asked=90, missed=2 / 3)
    assert ceiling.token_bytes == pytest.approx(600.0)
    assert ceiling.tokens_per_s == pytest.approx(1.0)


def divided(memory: int, needs: Any, device_memory: int | None = None, **more: Any) -> Placement:
    """Slots for a third of the experts, where they are apart from their layers."""
    return by_need(6, 16) if needs.experts is not None else Placement.in_memory(6, range(6), 0)


def test_a_run(
    tiny_random: Path, tmp_path: Path, run_bench: RunBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ways of the engine, in this process, on a mixture that is made of a tiny model."""
    from bench.lib import process, streamed
    from bench.lib.upcycle import ensure
    from bench.lib.upcycling import Mixture

    texts = [[(5 * i + text) % 120 + 3 for i in range(60)] for text in range(4)]
    monkeypatch.setattr("bench.lib.upcycle.calibration_texts", lambda folder: texts)
    dense = Path(shutil.copytree(tiny_random, tmp_path / "dense"))
    (dense / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    folder, _ = ensure(str(dense), tmp_path / "tiny-mixture", Mixture(8, 2))
    monkeypatch.setattr(upcycle, "upcycled", lambda args: folder)
    monkeypatch.setattr(streamed, "measured_job", lambda args, module, job: worker.work(job))
    monkeypatch.setattr(process, "drop_caches", lambda: None)
    monkeypatch.setattr("offspec.plan.fit.divide", divided)
    for module in (upcycle, jobs):
        monkeypatch.setattr(module, "raw_bandwidth", lambda *args: Bandwidth(1000, 1e-6, True))
    words = ["--model", str(dense), "--experts", "8", "--chosen", "2", "--prompts", "1"]
    words += ["--tokens", "6", "--off-tokens", "4", "--dtype", "float32", "--no-cgroup", "--keep-caches"]
    words += ["--engine-memory", "8GB", "--context", "512"]
    ran = run_bench(upcycle.main, *words, "--only", OFF, LARGE)
    (row,) = ran.record["cases"]
    assert row == ran.summary
    assert not any("error" in way for way in row["ways"].values()), row["ways"]
    for way in (OFF, LARGE):
        assert 0 <= row["ways"][way]["hit_rate"] <= row["ways"][way]["best_hit_rate"] <= 1
        assert row["ways"][way]["slots"] == 16
    assert row["ways"][OFF]["experts_per_pass"] == 6 * 2
    assert row["ways"][OFF]["tokens_per_pass"] == 1
    again = run_bench(upcycle.main, *words, "--only", OFF)
    assert [case["case"] for case in again.record["cases"]] == ["tiny-mixture"]  # measured again
    assert list(again.summary["ways"]) == [OFF]


@pytest.mark.parametrize("by_need", [False, True])
def test_experts_stay_with_their_layers_where_all_is_streamed(
    by_need: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offspec.plan import fit

    own = fit._expert_needs
    monkeypatch.setattr("bench.lib.worker.work", lambda job, watch: {"own": fit._expert_needs is own})
    assert worker.work({"by_need": by_need, "replan": True, "load": {}}) == {"own": by_need}
    assert fit._expert_needs is own


def test_llama_cpp_is_asked_with_mapped_weights_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.lib.report import Prompt
    from bench.peers.llama import LlamaFiles

    asked = list[dict[str, Any]]()
    monkeypatch.setattr("bench.peers.llama.run", lambda args, files, name, job: asked.append(job))
    args = upcycle.main.parser().parse_args(["--peer-tokens", "7"])
    files = LlamaFiles(tmp_path, tmp_path, tmp_path, {"chat-1": "hi"}, 0)
    for run in jobs.ways(args, tmp_path, files, LLAMA, (2, Prompt("chat-1", "chat", "hello"))).values():
        run()
    assert asked and not any(job["repack"] for job in asked)
    assert {(job["text"], job["tokens"], job["seed"]) for job in asked} == {("hi", 7, 3)}
