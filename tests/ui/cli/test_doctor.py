"""`offspec doctor`: one line per finding, or JSON; exit codes; and interrupts."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from offspec.engine.doctor import run_checks as examining
from offspec.engine.doctor.finding import CheckStarted, DoctorOptions, Finding

Call = Callable[..., Result]
WELL = Finding("torch", "ok", "2.13.0 [cu130]", figures={"threads": 2})
SLOW = Finding("disk: cache", "limited", "refuses \x1b[31mO_DIRECT", "use a local disk")
BAD = Finding("Triton on GPU 0", "failed", "no C compiler", "install a C compiler: " + "very " * 40 + "long")

SKIPPED = Finding("sample run, cpu", "absent", "the demo model is not installed", "pip install the-model")
NO_GPU = Finding("NVIDIA driver", "absent", "no NVIDIA GPU")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A scripted examination: its events, the error that ends it, and the options it got."""
    script: dict[str, Any] = {"events": [CheckStarted("torch"), WELL, CheckStarted("disks"), SLOW]}

    def examine(options: DoctorOptions) -> Iterator[CheckStarted | Finding]:
        script["options"] = options
        yield from script["events"]
        if "error" in script:
            raise script["error"]

    monkeypatch.setattr(examining, "run_checks", examine)
    return script


def test_findings_have_remedies(offspec: Call, script: dict[str, Any], tmp_path: Path) -> None:
    result = offspec("doctor", str(tmp_path))
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "ok       torch                  2.13.0 [cu130]",
        "limited  disk: cache            refuses \ufffd[31mO_DIRECT",
        "                                -> use a local disk",
        "",
        "All checks passed, 1 of them slower than possible.",
    ]
    assert script["options"] == DoctorOptions((tmp_path,))
    assert result.stderr == ""


def test_failure_gives_exit_code_1(offspec: Call, script: dict[str, Any]) -> None:
    script["events"] += [BAD]
    result = offspec("doctor", "--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["ok"], report["complete"]) == (1, False, True)
    assert [Finding(**each) for each in report["findings"]] == [WELL, SLOW, BAD]
    result = offspec("doctor")
    assert result.exit_code == 1
    assert f"-> {BAD.remedy}\n" in result.stdout
    assert result.stdout.splitlines()[-1] == "1 of 3 checks failed. For a bug report: offspec doctor --json"


def test_skipped_check_is_not_reported_as_passed(offspec: Call, script: dict[str, Any]) -> None:
    script["events"] += [NO_GPU, SKIPPED]
    result = offspec("doctor")
    assert result.exit_code == 0
    assert "All that was tried" not in result.stdout
    assert result.stdout.splitlines()[-2:] == [
        "",
        "Not tested: sample run, cpu. All other checks passed, 1 of them slower than possible.",
    ]
    script["events"].remove(SKIPPED)  # a part that the machine does not have is not reported
    assert offspec("doctor").stdout.splitlines()[-1].startswith("All checks passed")


@pytest.mark.parametrize("as_json", [False, True])
def test_interrupt_reports_finished_checks(offspec: Call, script: dict[str, Any], as_json: bool) -> None:
    script["error"] = KeyboardInterrupt()
    result = offspec("doctor", *["--json"] * as_json)
    assert result.exit_code == 130
    assert result.stderr == "stopped while checking: disks; 2 findings before that\n"
    if as_json:
        report = json.loads(result.stdout)
        assert (report["ok"], report["complete"], len(report["findings"])) == (False, False, 2)
    else:
        assert result.stdout.splitlines()[0].startswith("ok       torch")
        assert "All that was tried" not in result.stdout
