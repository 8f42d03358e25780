"""The benches' own machinery: prompts, groups, rates, tallies, and both programs on a scripted engine."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import offspec
from bench import acceptance
from bench.lib import bandwidth as rates
from bench.lib import cgroup, tally, worker
from bench.lib import report as harness
from bench.lib.cgroup import BenchError, MemoryCgroup
from bench.offload import __main__ as offload
from offspec.core.config import SamplingParams
from offspec.core.events import Event, Finished, Mismatch, PassStats, Result


def test_prompts_are_many_kinds_and_well_formed() -> None:
    prompts = harness.read_prompts()
    assert len(prompts) >= 24
    assert len({p.id for p in prompts}) == len({p.prompt for p in prompts}) == len(prompts)
    kinds = {p.kind for p in prompts}
    assert {"chat", "code", "story", "facts"} <= kinds
    assert {p.kind for p in harness.read_prompts(len(kinds))} == kinds
    assert all(p.id.startswith(p.kind) for p in prompts)


def test_prompt_errors_are_told(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="asked for"):
        harness.read_prompts(1000)
    (tmp_path / "bad.jsonl").write_text('{"id": "a"}\n')
    with pytest.raises(BenchError, match=r"bad\.jsonl"):
        harness.read_prompts(folder=tmp_path)


def test_results_name_files_without_their_folders(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    words = [str(tmp_path / "model"), "--draft", "org/name", "--budget", "7"]
    assert harness.command_line("bench.x", words) == "python -m bench.x model --draft org/name --budget 7"
    assert harness.model_name(str(tmp_path / "model")) == "model"
    assert str(Path.home()) not in json.dumps(harness.environment())


def test_raw_reads_stop_at_the_limit(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_bytes(os.urandom(10_000))
    assert rates.read_bandwidth(files, limit_bytes=1 << 20, block=4096).nbytes == 20_000
    some = rates.read_bandwidth(files, limit_bytes=8192, block=4096)
    assert some.nbytes == 8192
    assert some.bytes_per_s > 0
    with pytest.raises(FileNotFoundError):
        rates.read_bandwidth([tmp_path / "none"], limit_bytes=4096)


def test_gemm_rates_are_positive() -> None:
    found = rates.gemm_rates([1, 8], rows=64, columns=32, dtype="float32", seconds=0.01)
    assert [rate.tokens for rate in found] == [1, 8]
    assert all(rate.flops_per_s > 0 for rate in found)


@pytest.fixture
def group() -> Iterator[MemoryCgroup]:
    try:
        made = MemoryCgroup(150_000_000).__enter__()
    except BenchError as error:
        pytest.skip(str(error))
    yield made
    made.__exit__(None, None, None)
    assert not made.folder.exists()


def test_cgroup_measures_the_program(group: MemoryCgroup) -> None:
    code = "x = bytearray(60_000_000); import time; time.sleep(0.3); print('done')"
    assert group.run([sys.executable, "-S", "-c", code]) == "done\n"
    assert 60_000_000 < group.use.peak <= 150_000_000
    assert 60_000_000 < group.use.anon_peak <= group.use.peak
    assert group.use.oom_kills == 0


def test_cgroup_tells_of_a_program_over_the_limit(group: MemoryCgroup) -> None:
    with pytest.raises(BenchError, match="needed more than"):
        group.run([sys.executable, "-S", "-c", "x = bytearray(400_000_000)"])


def test_cgroup_tells_of_a_program_that_fails(group: MemoryCgroup) -> None:
    with pytest.raises(BenchError, match="exit code 3"):
        group.run([sys.executable, "-S", "-c", "raise SystemExit(3)"])


def test_no_right_to_make_a_group_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "memory.limit_in_bytes").write_text("1")
    monkeypatch.setattr(cgroup, "_V1", tmp_path)
    monkeypatch.setattr(cgroup, "_own_group", lambda version: "")

    def refuse(self: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(BenchError, match="--no-cgroup"):
        MemoryCgroup(1 << 20).__enter__()


def result(tokens: int, passes: int, **changes: Any) -> Result:
    settings: dict[str, Any] = {
        "text": "",
        "token_ids": tuple(range(tokens)),
        "passes": passes,
        "seconds": float(passes),
        "ttft_s": 1.0,
        "bytes_streamed": 100 * passes,
        "peak_memory_bytes": 1,
        "finish_reason": "length",
        "draft": "scripted",
        "budget": 8,
        "seed": 1,
        "target_seconds": 0.5 * passes,
        "draft_seconds": 0.5 * passes,
    }
    return Result(**{**settings, **changes})


class ScriptedEngine:
    """Answers like an engine: four tokens a pass when it speculates, three under the plain walk."""

    def __init__(self, verify: str) -> None:
        self.rate = 4 if verify == "coupled" else 3
        self.asked: list[SamplingParams] = []

    def __enter__(self) -> ScriptedEngine:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def generate(self, prompt: str, params: SamplingParams, *, check: bool = False) -> Result:
        self.asked.append(params)
        misses = (Mismatch(3, 1, 2, 0.01),) if params.temperature else ()
        return result(self.rate * 5, 5, mismatches=misses if check else None)

    def stream(
        self, prompt: str, params: SamplingParams, *, speculate: bool = True, check: bool = False
    ) -> Iterator[Event]:
        passes = -(-params.max_tokens // self.rate) if speculate else params.max_tokens
        for index in range(passes):
            yield PassStats(index, 8, 3, 2, self.rate if speculate else 1, 0.5, 0.5, 100)
        misses = (Mismatch(9, 1, 2, 0.25),) if check else None
        yield Finished(result(params.max_tokens, passes, mismatches=misses))


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ScriptedEngine]:
    def load(model: str, *, verify: str = "coupled", **settings: Any) -> ScriptedEngine:
        return ScriptedEngine(verify)

    monkeypatch.setitem(vars(offspec), "load", load)  # it is resolved on first use: no engine is needed
    return load


def test_acceptance_end_to_end(scripted: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    assert acceptance.main(["--prompts", "5", "--check", "--json", str(out)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("ceiling")
    last = json.loads(printed[-1])
    runs = {(run["verify"], run["temperature"]): run for run in last["runs"]}
    assert set(runs) == {("coupled", 0), ("coupled", 1), ("plain", 1)}  # greedy once
    assert runs["coupled", 1]["share_of_greedy"] == 1.0
    assert runs["plain", 1]["share_of_greedy"] == 0.75
    assert runs["plain", 1]["check"]["prompts_with_mismatch"] == 5
    assert runs["coupled", 0]["check"]["prompts_with_mismatch"] == 0
    saved = json.loads(out.read_text())
    assert len(saved["answers"]) == 15
    assert str(tmp_path) not in out.read_text()


def test_means_of_acceptance_differ_as_they_should() -> None:
    def answer(tokens: int, passes: int) -> acceptance.Answer:
        return acceptance.Answer("a", "chat", "coupled", 0.0, tokens, passes, 1.0, "length", "d", None)

    found = acceptance.yield_of([answer(10, 1), answer(10, 9)])
    assert found.pooled == 2.0
    assert found.mean == pytest.approx((10 + 10 / 9) / 2)


def job(speculate: bool, tokens: int) -> dict[str, Any]:
    return {
        "load": {"model": "m"},
        "params": {"temperature": 0.0, "max_tokens": tokens},
        "seed": 1,
        "speculate": speculate,
        "check": speculate,
        "prompts": [{"number": 0, "id": "chat-1", "text": "hello"}],
    }


def test_worker_prints_its_figures_last(scripted: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert worker.main(json.dumps(job(True, 16))) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["answers"][0]["passes"] == len(figures["answers"][0]["per_pass"]) == 4
    assert figures["process_peak_bytes"] > 0


@pytest.fixture
def ceiling() -> tally.Ceiling:
    disk = rates.Bandwidth(1000, 1.0, True)
    return tally.Ceiling(disk, layer_bytes=500, head_bytes=10, flops_per_token=10, gemm={1: 100.0, 8: 400.0})


def test_ceiling_is_bytes_and_flops_over_measured_rates(ceiling: tally.Ceiling) -> None:
    assert ceiling.link_seconds == 0.5
    assert ceiling.compute_seconds(1) == 0.1
    assert ceiling.compute_seconds(8) == 0.2
    assert ceiling.compute_seconds(6) == 0.15  # at the rate of 8, the nearest


def runs_of(scripted: object) -> list[dict[str, Any]]:
    both = []
    for speculate, tokens in ((False, 8), (True, 16)):
        run = {"speculate": speculate, "temperature": 0.0, "raw_bytes_per_s": 200.0}
        both.append({**run, **json.loads(json.dumps(worker.work(job(speculate, tokens))))})
    both[1]["cgroup_peak_bytes"] = 7
    return both


def test_tally_projects_off_to_the_tokens_of_on(scripted: object, ceiling: tally.Ceiling) -> None:
    row = tally.tally(runs_of(scripted), 0.0, ceiling)
    assert row["tokens_per_pass"] == 4.0
    assert row["off_seconds_per_token"] == 1.0
    assert row["speed_up"] == 4.0  # 16 passes of a second against 4
    assert row["prompts_with_another_token"] == 0
    assert row["check_gaps"] == {"chat-1": 0.25}
    assert row["on_link_use"] == 0.5  # 100 bytes a second of 200
    assert row["nodes_per_pass"] == 8
    assert row["ceiling_seconds_per_pass"] == 0.5
    assert row["ceiling_tokens_per_s"] == 8.0
    assert row["cgroup_peak_bytes"] == 7


def test_tally_sees_other_tokens_and_early_ends(scripted: object, ceiling: tally.Ceiling) -> None:
    runs = runs_of(scripted)
    runs[0]["answers"][0]["token_ids"][2] = 99
    row = tally.tally(runs, 0.0, ceiling)
    assert row["prompts_with_another_token"] == 1
    assert row["first_differences"] == {"chat-1": 2}
    runs = runs_of(scripted)
    runs[0]["answers"][0]["finish_reason"] = "eos"  # it stopped where the other went on
    assert tally.tally(runs, 0.0, ceiling)["prompts_with_another_token"] == 1


@pytest.mark.parametrize("differ", [False, True])
def test_offload_end_to_end(
    differ: bool, scripted: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    wide = tmp_path / "small-x4"
    wide.mkdir()
    (wide / "config.json").write_text('{"hidden_size": 64, "intermediate_size": 128}')
    (wide / "layer").write_bytes(bytes(8192))
    recipe = {"factor": 4, "fingerprint": "", "layer_files": ["layer"], "layer_bytes": 8000}
    (wide / "widened.json").write_text(json.dumps({**recipe, "head_bytes": 9, "matmul_parameters": 5}))

    def child(module: str, *words: str) -> str:
        if module == "bench.lib.widen":
            return f"{wide}\n"
        if module == "bench.lib.bandwidth":
            return json.dumps(
                [{"tokens": int(t), "flops_per_s": 1e9} for t in words[words.index("--tokens") + 1 :]]
            )
        found = worker.work(json.loads(words[1]))
        if differ and not json.loads(words[1])["speculate"]:
            found["answers"][0]["token_ids"] = (99,)
        return json.dumps(found) + "\n"

    monkeypatch.setattr(offload, "child", child)
    out = tmp_path / "result.json"
    code = offload.main(["--no-cgroup", "--keep-caches", "--prompts", "4", "--json", str(out)])
    printed = capsys.readouterr().out
    assert code == int(differ)
    assert printed.startswith("ceiling")
    assert "135M pair" in printed
    last = json.loads(printed.splitlines()[-1])
    assert [row["speed_up"] for row in last["runs"]] == [4.0, 4.0]
    assert last["liberties"] == ["a memory cgroup", "dropping the caches"]
    saved = json.loads(out.read_text())
    order = [run["speculate"] for run in saved["processes"]]
    assert order == [False, True, True, False] * 2  # in turns
    assert str(tmp_path) not in out.read_text()


def test_offload_worker_runs_in_the_group_with_caches_dropped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[Any] = []

    class Group(SimpleNamespace):
        use = cgroup.MemoryUse(100, 90, 80, 0)

        def __enter__(self) -> Group:
            return self

        def __exit__(self, *error: object) -> None:
            calls.append("removed")

        def run(self, argv: list[str], *, cwd: Path) -> str:
            calls.append(argv)
            return 'noise\n{"answers": []}\n'

    def make(limit: int) -> Group:
        calls.append(limit)
        return Group()

    monkeypatch.setattr(offload, "MemoryCgroup", make)
    monkeypatch.setattr(offload, "drop_caches", lambda: calls.append("dropped"))
    args: argparse.Namespace = offload.parser().parse_args(["--draft", "demo"])
    prompt = harness.Prompt("chat-1", "chat", "hello")
    figures = offload.run_worker(args, tmp_path, [(3, prompt)], 1.0, on=False)
    assert [call if isinstance(call, (str, int)) else "run" for call in calls] == [
        "dropped", 1_500_000_000, "run", "removed"
    ]  # fmt: skip
    sent = json.loads(calls[2][-1])
    assert (sent["load"]["draft"], sent["params"]["max_tokens"], sent["speculate"]) == ("none", 8, False)
    assert figures["cgroup_peak_bytes"] == 90
