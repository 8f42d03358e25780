"""What the bench of compiled kernels says of programs that it is given."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.kernels import compiled
from bench.lib.report import Report
from offspec.core.errors import RequestError


def program(**changed: Any) -> compiled.Program:
    return compiled.Program(
        **{
            "op": "tree_scan",
            "variant": "128x128",
            "kernel": "_tree_scan",
            "architecture": 89,
            "registers": 100,
            "stack": 0,
            "shared": 99 << 10,
            "fused_float64": 0,
            **changed,
        }
    )


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[compiled.Program]:
    """What is compiled for each architecture, with no compiler."""
    programs = [program(), program(variant="64x64", stack=16)]

    def compile_all(architecture: int, ops: Any, quick: bool) -> Iterator[compiled.Program]:
        yield from (one for one in programs if one.architecture == architecture)

    monkeypatch.setattr(compiled, "compile_all", compile_all)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return programs


def bench(out: Path, *architectures: int) -> tuple[dict[str, Any], int]:
    """The whole record and the exit code."""
    report = Report("kernels-compiled", "", out)
    args = argparse.Namespace(architectures=list(architectures) or [89], ops=None, quick=False)
    compiled.bench(args, report)
    record: dict[str, Any] = json.loads(out.read_text())
    return record, report.exit_code


def test_spills_are_named_and_no_failure(programs: list[compiled.Program], tmp_path: Path) -> None:
    record, code = bench(tmp_path / "out.json")
    assert code == 0
    assert [(one["variant"], one["stack"]) for one in record["spills"]] == [("64x64", 16)]
    [row] = record["largest"]
    assert (row["programs"], row["spilt"], row["stack"], row["shared"]) == (2, 1, 16, 99 << 10)


def test_a_program_that_cannot_be_launched_is_a_failure(
    programs: list[compiled.Program], tmp_path: Path
) -> None:
    programs += [program(shared=(99 << 10) + 1), program(architecture=80, shared=150 << 10)]
    record, code = bench(tmp_path / "out.json", 80, 89)
    assert code == 1
    assert [one["architecture"] for one in record["too_large"]] == [89]


def test_noise_that_is_fused_is_a_failure(programs: list[compiled.Program], tmp_path: Path) -> None:
    programs += [program(fused_float64=2)]
    assert bench(tmp_path / "out.json")[1] == 1


def test_what_cannot_be_compiled_for(
    programs: list[compiled.Program], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RequestError, match="75 is not known"):
        bench(tmp_path / "out.json", 75)
    programs.clear()
    with pytest.raises(RequestError, match="no operation"):
        bench(tmp_path / "out.json")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RequestError, match="unset TRITON_INTERPRET"):
        bench(tmp_path / "out.json")
