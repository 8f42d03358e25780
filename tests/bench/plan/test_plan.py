"""The bench of plans: its cases, its record, and the whole of it on a scripted `offspec plan`."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.lib.cgroup import BenchError, MemoryUse
from bench.plan import __main__ as plan
from bench.plan import cases as plan_cases
from bench.plan import record as plan_record
from bench.plan.cases import CASES, Case, Target
from offspec.core.config import EngineConfig
from tests.support.sample_plans import small, validation
from tests.support.tiny_models import write_model


def test_cases_are_written_as_they_are_read() -> None:
    assert [str(Case.parse(text)) for text in CASES] == list(CASES)
    for factor in (1, 2, 4):
        mine = [case for case in map(Case.parse, CASES) if case.factor == factor]
        assert {case.temperature for case in mine} == {0.0, 1.0}
        assert "least" in {case.memory for case in mine}


@pytest.mark.parametrize("text", ["", "x4", "x4:lots:0", "4:1GB", "xx:1GB:0", "x1:1GB:warm"])
def test_what_is_no_case_is_told(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="as x4:"):
        Case.parse(text)


def test_a_target_is_drafted_for_by_the_small_model() -> None:
    wide = Target("wide", "demo", 1024)
    assert wide.words() == ["wide", "--draft", "demo", "--draft-bits", "4", "--context", "1024"]
    assert wide.config(7, 1.0) == EngineConfig(
        "wide", draft="demo", draft_bits=4, memory=7, context=1024, temperature=1.0
    )
    assert Target.widened("demo", 1) == Target("demo")
    assert Target("demo").words() == ["demo", "--draft", "substitute"]
    assert Target("demo").config(7) == EngineConfig("demo", draft="substitute", memory=7)


def test_the_least_memory_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from offspec.core.errors import CapacityError
    from offspec.plan.initial_fit import initial_fit
    from offspec.plan.load import open_models

    target = Target(str(write_model(tmp_path / "model")), context=128)
    assert plan_cases.main([json.dumps(asdict(target))]) == 0
    least = int(capsys.readouterr().out)

    def begin(memory: int) -> None:
        opened = open_models(target.config(memory), lambda event: None)
        try:
            initial_fit(opened, None, None, lambda event: None)
        finally:
            opened.close()

    begin(least)
    with pytest.raises(CapacityError):
        begin(least // 2)


def test_a_record_grows_and_forgets_other_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "record.json"

    def keep(name: str, order: int, value: int) -> list[str]:
        case = {"case": name, "order": [order], "value": value}
        return [case["case"] + str(case["value"]) for case in plan_record.keep("p", out, {}, [case])["cases"]]

    assert keep("b", 2, 1) == ["b1"]
    assert keep("a", 1, 1) == ["a1", "b1"]
    assert keep("b", 2, 2) == ["a1", "b2"]
    monkeypatch.setattr(plan_record, "environment", lambda: {"cpu": "another"})
    assert keep("c", 3, 1) == ["c1"]
    out.write_text("{")
    assert keep("d", 4, 1) == ["d1"]


class Scripted:
    """Runs in place of processes: what is asked, and what `offspec plan` says to it."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, Sequence[str]]] = []
        self.fails: set[int] = set()
        self.said = validation().to_json()

    def run(self, args: argparse.Namespace, memory: int, argv: Sequence[str]) -> tuple[str, dict[str, int]]:
        self.asked.append((memory, argv))
        if memory in self.fails:
            raise BenchError("the measured process was killed")
        return f"noise\n{json.dumps({'plan': small().to_json(), **self.said})}\n", {"cgroup_peak_bytes": 90}

    def child(self, module: str, *words: str) -> str:
        if module == "bench.plan.cases":
            return "670000000\n"
        assert module == "bench.lib.widen"
        return "built\n"


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    scripted = Scripted()
    ceiling = {"raw_bytes_per_s": 2e9, "gemm_flops_per_s": {"1": 1e10, "64": 2e11}}
    monkeypatch.setattr(plan, "run", scripted.run)
    monkeypatch.setattr(plan_cases, "child", scripted.child)
    monkeypatch.setattr(plan, "find_ceiling", lambda args, target: ceiling)
    monkeypatch.setattr(plan, "raw_bandwidth", lambda args, target: 2e9)
    return scripted


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, list[str], Any]]:
    """Run the bench; its exit code, what it printed, and the record."""
    out = tmp_path / "result.json"

    def call(*words: str) -> tuple[int, list[str], Any]:
        code = plan.main([*words, "--json", str(out)])
        return code, capsys.readouterr().out.splitlines(), json.loads(out.read_text())

    return call


def test_a_plan_that_is_right(scripted: Scripted, bench: Callable[..., Any], tmp_path: Path) -> None:
    code, printed, record = bench("--cases", "x4:1.5GB:1", "x1:least:0", "--prompts", "3")
    assert code == 0
    assert printed[0].startswith("ceiling  x1: disk 2.00 GB/s") and printed[1].startswith("ceiling  x4")
    (least, first), (memory, second) = scripted.asked
    assert (least, memory) == (670_000_000, 1_500_000_000)
    assert list(first)[1:5] == ["-m", "offspec", "plan", "demo"]
    assert list(second)[5:11] == ["--draft", "demo", "--draft-bits", "4", "--context", "1024"]
    asked = "--memory 1500000000 --temperature 1 --replan --validate --prompts 3 --json --quiet"
    assert " ".join(second[11:]) == asked
    assert [case["case"] for case in record["cases"]] == ["x1:least:0", "x4:1.5GB:1"]
    found = record["cases"][1]
    assert found["seconds_per_pass"] == {
        "predicted": 1.35,
        "measured": 1.38,
        "error": pytest.approx(0.03 / 1.38),
    }
    assert (found["missed"], found["stalled"], len(found["rows"])) == ([], 0, 3)
    assert (found["plan"]["budget"], found["plan"]["disk_bytes"]) == (256, 2_712_000_000)
    assert found["cgroup_peak_bytes"] == 90
    assert json.loads(printed[-1])["cases"][1]["tok_per_s"] == found["tok_per_s"]
    assert str(tmp_path) not in json.dumps(record)


def test_a_plan_that_is_wrong_is_told_until_it_is_right(
    scripted: Scripted, bench: Callable[..., Any]
) -> None:
    scripted.said["seconds_per_pass"] = {"predicted": 1.0, "measured": 1.2, "error": 0.2 / 1.2}
    scripted.said["rows"][0]["seconds_per_pass"] = {"predicted": 1.0, "measured": 2.5, "error": 0.6}
    code, printed, record = bench("--cases", "x1:1GB:0")
    assert code == 1
    assert record["cases"][0]["missed"] == ["seconds_per_pass"]
    assert record["cases"][0]["stalled"] == 1
    assert "note     x1:1GB:0 is off by more than it may" in printed
    scripted.said = validation().to_json()
    assert bench("--cases", "x1:2GB:0")[0] == 1, "the record still has the other case"
    code, _, record = bench("--cases", "x1:1GB:0")
    assert code == 0 and len(record["cases"]) == 2


def test_an_error_that_is_no_number_is_missed(scripted: Scripted, bench: Callable[..., Any]) -> None:
    scripted.said["tok_per_s"] = {"predicted": 1.0, "measured": 0.0, "error": float("nan")}
    assert bench("--cases", "x1:1GB:0")[2]["cases"][0]["missed"] == ["tok_per_s"]


def test_one_that_fails_does_not_stop_the_others(scripted: Scripted, bench: Callable[..., Any]) -> None:
    scripted.fails = {750_000_000}
    code, printed, record = bench("--factors", "1")
    assert code == 1
    failed = [case["case"] for case in record["cases"] if "error" in case]
    assert failed == ["x1:0.75GB:0"]
    assert len(record["cases"]) == len([text for text in CASES if text.startswith("x1")])
    assert any("was killed" in line for line in printed)


def test_it_runs_in_the_group_with_caches_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Group(SimpleNamespace):
        use = MemoryUse(100, 90, 80, 0)

        def __enter__(self) -> Group:
            return self

        def __exit__(self, *error: object) -> None:
            calls.append("removed")

        def run(self, argv: list[str], *, cwd: Path) -> str:
            calls.append(argv)
            return "{}\n"

    def make(limit: int) -> Group:
        calls.append(limit)
        return Group()

    monkeypatch.setattr(plan, "MemoryCgroup", make)
    monkeypatch.setattr(plan, "drop_caches", lambda: calls.append("dropped"))
    args = plan.parser().parse_args([])
    found = plan.run(args, 100, ["true"])
    assert calls == ["dropped", 100, ["true"], "removed"]
    assert found == ("{}\n", {"cgroup_peak_bytes": 90, "cgroup_anon_peak_bytes": 80})
    free = plan.parser().parse_args(["--no-cgroup", "--keep-caches"])
    assert plan.run(free, 100, ["echo", "{}"]) == ("{}\n", {})
    with pytest.raises(BenchError, match="exit code 1"):
        plan.run(free, 100, ["false"])


def test_a_first_run_finds_models_and_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OFFSPEC_CACHE", str(tmp_path))
    for name in ("described", "unpacked", "widened", "plans", "drafts"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    with plan.cache_of_its_own(True) as words:
        assert words[0] == "env"
        folder = Path(words[1].removeprefix("OFFSPEC_CACHE="))
        assert sorted(os.listdir(folder)) == ["described", "unpacked", "widened"]
        assert (folder / "unpacked" / "file").exists()
    assert not folder.exists()
    assert (tmp_path / "unpacked" / "file").exists()
    with plan.cache_of_its_own(False) as words:
        assert words == []
