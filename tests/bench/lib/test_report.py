"""Prompts, the names in results, and how a bench ends."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from bench.lib import report
from bench.lib.cgroup import BenchError
from bench.lib.command import Command, shared
from bench.lib.report import Report


def test_prompts_are_many_kinds_and_well_formed() -> None:
    prompts = report.read_prompts()
    assert len(prompts) >= 24
    assert len({p.id for p in prompts}) == len({p.prompt for p in prompts}) == len(prompts)
    kinds = {p.kind for p in prompts}
    assert {"chat", "code", "story", "facts"} <= kinds
    assert {p.kind for p in report.read_prompts(len(kinds))} == kinds
    assert all(p.id.startswith(p.kind) for p in prompts)


def test_prompt_errors_are_told(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="asked for"):
        report.read_prompts(1000)
    (tmp_path / "bad.jsonl").write_text('{"id": "a"}\n')
    with pytest.raises(BenchError, match=r"bad\.jsonl"):
        report.read_prompts(folder=tmp_path)


def test_results_name_files_without_their_folders(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    words = [str(tmp_path / "model"), "--draft", "org/name", "--budget", "7"]
    assert report.command_line("bench.x", words) == "python -m bench.x model --draft org/name --budget 7"
    assert report.model_name(str(tmp_path / "model")) == "model"
    assert str(Path.home()) not in json.dumps(report.environment())


def test_records_lie_in_results_unless_named() -> None:
    assert Report("x").file("-cuda", ".svg") == report.RESULTS / "x-cuda.svg"
    assert Report("x", out=Path("here.json")).file("-cuda", ".svg") == Path("here.svg")


def test_a_bench_ends_with_its_figures_or_its_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def options(p: argparse.ArgumentParser) -> None:
        shared(p, "no_cgroup", "budget", width=3, temperatures=[0.5])

    def measure(args: argparse.Namespace, told: Report) -> dict[str, Any]:
        if args.budget == 0:
            raise BenchError("too small")
        if args.budget < 8:
            told.missed("less than was wanted")
        summary = told.head(args, "budget", "width", "temperatures", "no_cgroup")
        told.record(summary, device="gpu", more=[1])
        return summary

    main, out = Command("x", "An example.", options, measure, module="a.x"), tmp_path / "new" / "x.json"
    assert main(["--json", str(out)]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary == {"bench": "x", "budget": 256, "width": 3, "temperatures": [0.5], "no_cgroup": False}
    record = json.loads(out.read_text())
    assert record | summary == record and (record["environment"]["device"], record["more"]) == ("gpu", [1])
    assert record["command"] == "python -m bench.a.x --json x.json"
    assert main(["--budget", "7", "--json", str(out)]) == 1
    assert "note     less than was wanted" in capsys.readouterr().out
    assert main(["--budget", "0"]) == BenchError.exit_code
    assert capsys.readouterr().err == "error: too small\n"
