"""Fixtures: running a bench as a program, and a model for streaming benches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.lib import random_model
from bench.lib.command import Command
from tests.support.bench_runs import Ran, RunBench


@pytest.fixture
def run_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> RunBench:
    """Run a bench; check that the ceiling is first, JSON last, and the record has no folder."""
    out = tmp_path / "results" / "bench.json"

    def run(main: Command, *words: str) -> Ran:
        code = main([*words, "--json", str(out)])
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("ceiling")
        text = out.read_text()
        assert main.parser().prog in text and str(tmp_path) not in text
        return Ran(code, lines, json.loads(lines[-1]), json.loads(text))

    return run


@pytest.fixture(scope="session")
def tiny_random(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random model of a tiny shape; tests must not write to it."""
    return random_model.build(random_model.SHAPES["tiny"], tmp_path_factory.mktemp("random") / "tiny")
