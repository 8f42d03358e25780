"""The bench of plans: its cases, its record, and the whole of it on a scripted `offspec plan`."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from bench.lib import record as plan_record
from bench.lib.cgroup import BenchError
from bench.lib.report import Report
from bench.plan import __main__ as plan
from bench.plan import cases as plan_cases
from bench.plan.cases import CASES, Case, Target
from offspec.core.config import EngineConfig
from tests.support.bench_runs import RunBench
from tests.support.sample_plans import small, validation
from tests.support.tiny_models import write_model


def test_cases_are_written_as_they_are_read() -> None:
    assert [str(Case.parse(text)) for text in CASES] == list(CASES)
    for factor in (1, 2, 4):
        mine = [case for case in map(Case.parse, CASES) if case.factor == factor]
        assert {case.temperature for case in mine} == {0.0, 1.0}
        assert "least" in {case.memory for case in mine}


def test_a_target_is_drafted_for_by_the_small_model() -> None:
    wide = Target("wide", "demo", 1024)
    assert wide.words() == ["wide", "--draft", "demo", "--draft-bits", "4", "--context", "1024"]
    assert wide.config(7, 1.0) == EngineConfig(
        "wide", draft="demo", draft_bits=4, memory=7, device="cpu", context=1024, temperature=1.0
    )
    assert Target.widened("demo", 1) == Target("demo")
    assert Target("demo").words() == ["demo", "--draft", "substitute"]
    assert Target("demo").config(7) == EngineConfig("demo", draft="substitute", memory=7, device="cpu")


def test_the_least_memory_is_enough(tmp_path: Path) -> None:
    from offspec.core.errors import CapacityError
    from offspec.plan.initial_fit import initial_fit
    from offspec.plan.load import open_models

    target = Target(str(write_model(tmp_path / "model")), context=128)
    least = plan_cases.least_memory(target)

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
        record = plan_record.keep(Report("p", out=out), {}, case)
        return [case["case"] + str(case["value"]) for case in record["cases"]]

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

    def run(self, args: argparse.Namespace, argv: Sequence[str], memory: int) -> tuple[str, dict[str, int]]:
        self.asked.append((memory, argv))
        if memory in self.fails:
            raise BenchError("the measured process was killed")
        return json.dumps({"plan": small().to_json(), **self.said}), {"cgroup_peak_bytes": 90}

    def child(self, module: str, *words: str) -> str:
        if module == "bench.plan.cases":
            return "670000000"
        assert module == "bench.lib.widen"
        return "built"


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    scripted = Scripted()
    ceiling = {"raw_bytes_per_s": 2e9, "gemm_flops_per_s": {"1": 1e10, "64": 2e11}}
    monkeypatch.setattr(plan, "measured", scripted.run)
    monkeypatch.setattr(plan_cases, "child", scripted.child)
    monkeypatch.setattr(plan, "find_ceiling", lambda args, target: ceiling)
    monkeypatch.setattr(plan, "read_disk", lambda args, target: 2e9)
    return scripted


@pytest.fixture
def bench(run_bench: RunBench) -> RunBench:
    return partial(run_bench, plan.main)


def test_a_plan_that_is_right(scripted: Scripted, bench: RunBench) -> None:
    ran = bench("--cases", "x4:1.5GB:1", "x1:least:0", "--prompts", "3")
    printed, record = ran.lines, ran.record
    assert ran.code == 0
    assert printed[0].startswith("ceiling  x1: disk 2.00 GB/s") and printed[1].startswith("ceiling  x4")
    (least, first), (memory, second) = scripted.asked
    assert (least, memory) == (670_000_000, 1_500_000_000)
    assert list(first)[1:5] == ["-m", "offspec", "plan", "demo"]
    assert list(second)[5:11] == ["--draft", "demo", "--draft-bits", "4", "--context", "1024"]
    asked = "--memory 1500000000 --temperature 1 --replan --validate --prompts 3 --json --quiet --device cpu"
    assert " ".join(second[11:]) == asked
    assert [case["case"] for case in record["cases"]] == ["x1:least:0", "x4:1.5GB:1"]
    found = record["cases"][1]
    error = pytest.approx(0.03 / 1.38)
    assert found["seconds_per_pass"] == {"predicted": 1.35, "measured": 1.38, "error": error}
    assert (found["missed"], found["stalled"], len(found["rows"])) == ([], 0, 3)
    assert (found["plan"]["budget"], found["plan"]["disk_bytes"]) == (256, 2_712_000_000)
    assert found["cgroup_peak_bytes"] == 90
    assert ran.summary["cases"][1]["tok_per_s"] == found["tok_per_s"]


def test_a_plan_that_is_wrong_is_told_until_it_is_right(scripted: Scripted, bench: RunBench) -> None:
    scripted.said["seconds_per_pass"] = {"predicted": 1.0, "measured": 1.2, "error": 0.2 / 1.2}
    scripted.said["rows"][0]["seconds_per_pass"] = {"predicted": 1.0, "measured": 2.5, "error": 0.6}
    ran = bench("--cases", "x1:1GB:0")
    assert ran.code == 1
    assert ran.record["cases"][0]["missed"] == ["seconds_per_pass"]
    assert ran.record["cases"][0]["stalled"] == 1
    assert "note     x1:1GB:0 is off by more than it may" in ran.lines
    scripted.said = validation().to_json()
    assert bench("--cases", "x1:2GB:0").code == 1, "the record still has the other case"
    ran = bench("--cases", "x1:1GB:0")
    assert ran.code == 0 and len(ran.record["cases"]) == 2


def test_an_error_that_is_no_number_is_missed(scripted: Scripted, bench: RunBench) -> None:
    scripted.said["tok_per_s"] = {"predicted": 1.0, "measured": 0.0, "error": float("nan")}
    assert bench("--cases", "x1:1GB:0").record["cases"][0]["missed"] == ["tok_per_s"]


def test_one_that_fails_does_not_stop_the_others(scripted: Scripted, bench: RunBench) -> None:
    scripted.fails = {750_000_000}
    ran = bench("--factors", "1")
    assert ran.code == 1
    failed = [case["case"] for case in ran.record["cases"] if "error" in case]
    assert failed == ["x1:0.75GB:0"]
    assert len(ran.record["cases"]) == len([text for text in CASES if text.startswith("x1")])
    assert any("was killed" in line for line in ran.lines)


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
