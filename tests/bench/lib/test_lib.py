"""Code shared by the benches: memory groups, and the end of a bench."""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bench.lib.cgroup import BenchError, MemoryCgroup
from bench.lib.command import Command, shared
from bench.lib.report import Report
from tests.support.waiting import wait_until


def test_a_group_measures_and_limits_its_program(tmp_path: Path) -> None:
    try:
        group = MemoryCgroup(150_000_000).__enter__()
    except BenchError as error:
        pytest.skip(str(error))
    seen = tmp_path / "seen"
    wait = f"import os, time\nwhile not os.path.exists({str(seen)!r}): time.sleep(0.01)"
    code = f"x = bytearray(60_000_000)\n{wait}\nprint('done')"
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(group.run, [sys.executable, "-S", "-c", code])
        try:
            wait_until(lambda: running.done() or group._anon_peak > 60_000_000)
        finally:
            seen.touch()
        assert running.result() == "done\n"
    assert 60_000_000 < group.use.anon_peak <= group.use.peak <= 150_000_000
    with pytest.raises(BenchError, match="exit code 3"):
        group.run([sys.executable, "-S", "-c", "raise SystemExit(3)"])
    with pytest.raises(BenchError, match="needed more than"):
        group.run([sys.executable, "-S", "-c", "x = bytearray(400_000_000)"])
    group.__exit__(None, None, None)
    assert not group.folder.exists()


def test_a_bench_ends_with_its_figures_or_its_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(args: argparse.Namespace, told: Report) -> dict[str, Any]:
        if args.budget == 0:
            raise BenchError("too small")
        if args.budget < 8:
            told.missed("less than was wanted")
        summary = told.head(args, "budget", "width", "temperatures", "no_cgroup")
        told.record(summary, device="gpu", more=[1])
        return summary

    def options(p: argparse.ArgumentParser) -> None:
        shared(p, "no_cgroup", "budget", width=3, temperatures=[0.5])

    main, out = Command("x", "An example.", options, measure, module="a.x"), tmp_path / "new" / "x.json"
    assert main(["--json", str(out)]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary == {"bench": "x", "budget": 256, "width": 3, "temperatures": [0.5], "no_cgroup": False}
    record = json.loads(out.read_text())
    assert record | summary == record and (record["environment"]["device"], record["more"]) == ("gpu", [1])
    assert record["command"] == "python -m bench.a.x --json x.json"
    assert main(["--budget", "7", "--json", str(out)]) == 1
    assert main(["--budget", "0"]) == BenchError.exit_code
    assert capsys.readouterr().err == "error: too small\n"
