"""The peers bench without peers: projections, tallies, failures, tables, and the program on scripted runs."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.lib.cgroup import BenchError
from bench.lib.report import Prompt
from bench.peers import __main__ as peers
from bench.peers import env as peers_env
from bench.peers import jobs as peers_jobs
from bench.peers import tally as peers_tally
from bench.peers import worker as peer_worker
from bench.peers.jobs import ACCELERATE, AIRLLM, ASSISTED, OFF, OFFSPEC, Scene, Variant
from offspec_planners.measure import Bandwidth
from tests.support.bench_runs import RunBench
from tests.support.peer_runs import RECIPE, answer, run


def test_a_token_a_pass_is_projected_by_its_median() -> None:
    slow_start = answer([1, 1, 1, 1], [5.0, 2.0, 2.0, 9.0])
    assert peers_tally.project(slow_start, 11) == 5.0 + 10 * 2.0
    assert peers_tally.project(slow_start, 4) == slow_start["seconds"]


def test_several_tokens_a_pass_are_projected_by_their_rate() -> None:
    chain = answer([4, 6, 2], [5.0, 3.0, 1.0])
    assert peers_tally.project(chain, 20) == 5.0 + 16 * 0.5
    assert peers_tally.project(chain, 3) == 5.0  # the first pass gives more than that
    assert peers_tally.project(chain, 12) == 9.0


def test_the_engine_s_own_passes_are_understood() -> None:
    own = answer([1, 1], [2.0, 3.0])
    own["per_pass"] = [{"emitted": 1, "draft_seconds": 1.0, "target_seconds": s} for s in (1.0, 2.0)]
    assert peers_tally.project(own, 4) == 2.0 + 3 * 3.0


def test_the_fastest_settings_count_and_failures_are_kept() -> None:
    runs = [
        run(OFFSPEC, answer([4, 4], [1.0, 1.0])),
        run(OFF, answer([1, 1], [1.0, 1.0])),
        run(ASSISTED, answer([2] * 4, [2.0] * 4), "slow"),
        run(ASSISTED, answer([4] * 2, [2.0] * 2), "fast"),
        run(ASSISTED, None, "greedy for memory"),
        run(ACCELERATE, answer([1, 1], [3.0, 2.0]), "only"),
    ]
    row = peers_tally.summarise(runs, 0.0)["contenders"]
    assert row[ASSISTED]["settings"] == "fast"
    assert row[ASSISTED]["offspec_is_faster_by"] == 2.0
    assert row[ASSISTED]["tokens_per_pass"] == 4.0
    assert set(row[ASSISTED]["settings_tried"]) == {"slow", "fast"}
    assert [f["settings"] for f in row[ASSISTED]["failures"]] == ["greedy for memory"]
    assert row[ACCELERATE]["offspec_is_faster_by"] == (3.0 + 7 * 2.0) / 2.0
    assert row[ACCELERATE]["tokens_per_s"] == 8 / 17.0
    assert row[ACCELERATE]["read_bytes_per_token"] == 1000
    assert row[OFFSPEC]["same_tokens"] is True
    assert row[OFF]["same_tokens"] is None


def test_settings_that_answered_less_do_not_look_faster() -> None:
    short = run(ASSISTED, answer([2, 2], [2.0, 2.0]), "short")
    long = run(ASSISTED, answer([4, 4, 4], [2.0, 2.0, 2.0]), "long")
    assert peers_tally.fastest([short, long], {}) == "long"
    assert peers_tally.fastest([run(ASSISTED, None)], {}) is None


def test_text_is_compared_only_where_it_can_agree() -> None:
    other = answer([1, 1], [1.0, 1.0], token_ids=[0, 9])
    for temperature, claimed in ((0.0, False), (1.0, None)):
        runs = [
            run(OFFSPEC, answer([4], [1.0]), temperature=temperature),
            run(OFF, answer([1, 1], [1.0, 1.0]), temperature=temperature),
            run(ACCELERATE, other, temperature=temperature),
        ]
        found = peers_tally.summarise(runs, temperature)["contenders"]
        assert found[ACCELERATE]["same_tokens"] is claimed
        assert found[OFFSPEC]["same_tokens"] is True
    assert found[ACCELERATE]["first_differences"] == {}


def rows(**contenders: Any) -> list[dict[str, Any]]:
    return [{"temperature": 0.0, "contenders": contenders}]


def test_shortfalls_are_plain_sentences() -> None:
    fine = rows(
        offspec={"same_tokens": True},
        accelerate={"offspec_is_faster_by": 20.0},
        assisted={"offspec_is_faster_by": 5.0},
    )
    assert peers_tally.shortfalls(fine, peers_jobs.PLAIN) == []
    short = rows(
        offspec={"same_tokens": False, "first_differences": {"chat-1": 3}},
        accelerate={"offspec_is_faster_by": 19.9},
        assisted={"error": {"kind": "killed", "message": ""}},
    )
    told = peers_tally.shortfalls(short, peers_jobs.PLAIN)
    assert "19.90x accelerate, disk at temperature 0, where 20x was the aim" in told[0]
    assert told[1].startswith("assisted generation did not run")
    assert "speculation changed 1 answers" in told[2]
    assert peers_tally.shortfalls(fine, [OFFSPEC, ACCELERATE]) == []
    assert peers_tally.shortfalls(short, [ASSISTED]) == told[2:]
    assert peers_tally.speed_ups(short, ASSISTED) == {"0": None}


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    return Scene(tmp_path, RECIPE, tmp_path, Path(sys.executable), {"shards": "s"}, {})


def test_settings_give_the_draft_its_room(scene: Scene) -> None:
    def resident(variant: Variant) -> int:
        places = variant.settings["placement"]["device_map"]
        return sum(place == "cpu" for name, place in places.items() if "layers" in name)

    args = arguments("--peer-memory", "500B")
    documented, mapped, copied = peers_jobs.variants(args, scene, ACCELERATE)
    assert documented.settings["placement"] == {"max_memory": 500}
    assert (resident(mapped), resident(copied)) == (0, 3)  # 500 less the head's 150, in layers of 100
    tried = peers_jobs.variants(args, scene, ASSISTED)
    assert all(variant.settings["draft"] == str(scene.draft) for variant in tried)
    assert {resident(variant) for variant in tried[1:]} == {2}
    assert tried[1].settings["assistant"] == {}
    assert len({variant.name for variant in tried}) == len(tried)
    assert peers_jobs.variants(args, scene, AIRLLM)[0].settings == {}


def arguments(*words: str) -> argparse.Namespace:
    return peers.main.parser().parse_args(["--no-cgroup", "--keep-caches", *words])


def script(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(text)
    monkeypatch.setattr(peers_env, "WORKER", worker)


GROUP = [(0, Prompt("chat-1", "chat", "hello"))]


def test_a_peer_s_process_gets_its_job_and_tells_its_figures(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(
        tmp_path,
        "import sys, json\nprint('noise')\nprint(json.dumps({'job': json.loads(sys.argv[1])}))",
        monkeypatch,
    )
    args = arguments("--airllm-tokens", "3", "--tokens", "9")
    found = peers_jobs.run(args, scene, Variant(AIRLLM, "", {}), GROUP, 1.0)
    assert found["contender"] == AIRLLM
    assert (found["job"]["max_tokens"], found["job"]["shards"], found["job"]["temperature"]) == (3, "s", 1.0)
    found = peers_jobs.run(args, scene, Variant(ASSISTED, "x", {"draft": "d"}), GROUP, 0.0)
    assert (found["job"]["max_tokens"], found["job"]["draft"], found["job"]["peer"]) == (9, "d", ACCELERATE)
    assert "shards" not in found["job"]


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("raise SystemExit(3)", "failed", "exit code 3"),
        ('print(\'{"error": {"kind": "ValueError", "message": "no"}}\')', "ValueError", "no"),
    ],
)
def test_a_peer_that_fails_is_told_not_dropped(
    text: str, kind: str, message: str, scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path, text, monkeypatch)
    found = peers_jobs.run(arguments(), scene, Variant(AIRLLM, "", {}), GROUP, 0.0)
    assert found["error"]["kind"] == kind
    assert message in found["error"]["message"]


def test_kills_and_timeouts_have_kinds_of_their_own(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> Any:
        raise BenchError("the measured process was killed: it needed more than 1.5 GB")

    monkeypatch.setattr(peers_jobs, "ask", refuse)
    variant = Variant(OFFSPEC, "", {})
    assert peers_jobs.run(arguments(), scene, variant, GROUP, 0.0)["error"]["kind"] == "killed"
    late = arguments("--peer-seconds", "0")
    assert peers_jobs.run(late, scene, variant, GROUP, 0.0)["error"]["kind"] == "timeout"


def test_worker_imports_nothing_of_the_project() -> None:
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); print(sorted(sys.modules))"
    command = [sys.executable, "-I", "-S", "-c", code, str(peers_env.WORKER)]
    loaded = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert "'json'" in loaded
    assert not any(f"'{name}" in loaded for name in ("offspec", "bench", "torch", "transformers"))


def test_clock_sees_passes_and_not_the_prompt() -> None:
    import torch

    clock = peer_worker.Clock()
    for value in (torch.tensor([[7, 8, 9]]), torch.tensor([[1, 2]]), torch.tensor([3])):
        clock.put(value)
    assert clock.tokens == [[1, 2], [3]]
    assert len(clock.times) == 2


def test_sampling_is_from_the_whole_distribution() -> None:
    greedy = peer_worker.generation_settings({"max_tokens": 4, "temperature": 0.0}, None)
    assert greedy == {"max_new_tokens": 4, "do_sample": False}
    warm = peer_worker.generation_settings({"max_tokens": 4, "temperature": 1.0}, "draft")
    assert (warm["top_k"], warm["top_p"], warm["assistant_model"]) == (0, 1.0, "draft")


def test_links_have_the_names_that_the_hub_uses(tmp_path: Path) -> None:
    target = tmp_path / "wide"
    target.mkdir()
    for name in ("model-layer-0.safetensors", "model-outer.safetensors", "config.json", "widened.json"):
        (target / name).write_text(name)
    index = {"weight_map": {"a": "model-layer-0.safetensors", "b": "model-outer.safetensors"}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    peers_env.link_shards(target, tmp_path / "view")
    found = json.loads((tmp_path / "view" / "model.safetensors.index.json").read_text())["weight_map"]
    assert found == {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    assert (tmp_path / "view" / found["b"]).read_text() == "model-outer.safetensors"
    assert (tmp_path / "view" / "config.json").exists()
    assert not (tmp_path / "view" / "widened.json").exists()


def test_every_version_is_pinned_and_none_is_cuda() -> None:
    pinned = peers_env.pinned()
    assert {"torch", "transformers", "accelerate", "airllm"} <= set(pinned)
    assert not any("nvidia" in name or "cuda" in name or "triton" in name for name in pinned)
    constraints = (Path(peers_env.REQUIREMENTS).parents[2] / "constraints.txt").read_text()
    for name in ("torch", "transformers", "accelerate"):
        assert f"{name}=={pinned[name]}\n" in constraints  # the peers get what offspec has


def test_a_run(tmp_path: Path, run_bench: RunBench, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "widened.json").write_text(json.dumps(RECIPE))
    seen: list[tuple[str, str, str, float]] = []

    def scripted(args: Any, scene: Scene, variant: Variant, group: Any, temperature: float) -> dict[str, Any]:
        name = group[0][1].id
        seen.append((name, variant.contender, variant.name, temperature))
        if variant.contender == AIRLLM:
            return run(AIRLLM, None, temperature=temperature)
        step = {OFFSPEC: 0.5, ASSISTED: 2.0}.get(variant.contender, 1.0)
        step /= 2 if "constant 20" in variant.name else 1
        emitted = [4, 4] if variant.contender in (OFFSPEC, ASSISTED) else [1, 1]
        return run(variant.contender, answer(emitted, [step] * 2, name), variant.name, temperature)

    def prepare(target: Path, recipe: Any, draft: Path, only: Any) -> Scene:
        return Scene(target, recipe, draft, None, {}, {})

    monkeypatch.setattr(peers, "widened", lambda args: tmp_path)
    monkeypatch.setattr(peers, "child", lambda module, *words: str(tmp_path))
    monkeypatch.setattr(peers, "raw_bandwidth", lambda *args: Bandwidth(1000, 1.0, True))
    monkeypatch.setattr(peers, "prepare", prepare)
    monkeypatch.setattr(peers, "run", scripted)
    ran = run_bench(peers.main, "--prompts", "2", "--no-cgroup", "--keep-caches")
    last = ran.summary
    assert last["speedup_vs_accelerate"] == {"0": 8.0, "1": 8.0}
    assert last["speedup_vs_assisted"] == {"0": 2.0, "1": 2.0}
    assert ran.code == 1  # AirLLM's failure is no shortfall, but 2x assisted is
    assert any("5x was the aim" in line for line in ran.lines)
    assert last["runs"][0]["contenders"][AIRLLM]["error"]["kind"] == "killed"
    first, second = last["prompts"]
    chosen = [name for prompt, who, name, t in seen if (prompt, who, t) == (second, ASSISTED, 0.0)]
    assert chosen == ["copied to RAM, constant 20"]
    assert len([1 for prompt, who, _, t in seen if (prompt, who, t) == (first, ASSISTED, 0.0)]) == 5
    assert ran.record["environment"]["peers"]["airllm"]
