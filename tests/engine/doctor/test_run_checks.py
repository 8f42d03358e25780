"""Doctor: checks run in a separate process; a crash becomes a finding, and the other checks still run."""

import os
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name

import pytest

from offspec.engine.doctor.finding import CheckStarted, DoctorOptions, Finding
from offspec.engine.doctor.run_checks import CHECKS, Check, run_checks
from offspec.engine.doctor.worker import REPORT, run_check
from tests.support.waiting import wait_until

PLACE = "tests.engine.doctor.broken_checks"


@pytest.fixture(autouse=True)
def _findable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))


def checks(*names: str) -> list[Check]:
    return [Check(name, f"title of {name}", f"{PLACE}:{name}") for name in names]


def findings(chosen: Sequence[Check], *folders: Path) -> list[Finding]:
    return [event for event in run_checks(DoctorOptions(folders), chosen) if isinstance(event, Finding)]


def test_each_check_is_announced_and_they_share_a_process(tmp_path: Path) -> None:
    events = list(run_checks(DoctorOptions((tmp_path,)), checks("well", "well")))
    assert [type(event) for event in events] == [CheckStarted, Finding, CheckStarted, Finding]
    assert events[0] == CheckStarted("title of well")
    first, second = (event for event in events if isinstance(event, Finding))
    assert first == second and first.found == "1 folders"
    assert first.figures["pid"] != os.getpid()


def test_a_crash_of_the_process_is_reported_and_the_rest_runs() -> None:
    found = findings(checks("crashing", "killed", "leaving", "well"))
    assert [(each.part, each.state) for each in found] == [
        ("before", "ok"),
        ("title of crashing", "failed"),
        ("title of killed", "failed"),
        ("title of leaving", "failed"),
        ("well", "ok"),
    ]
    assert found[1].found == "the process of this check was killed by SIGSEGV: what(): driver gone"
    assert "SIGKILL" in found[2].found and "memory" in found[2].remedy
    assert found[3].found == "the process of this check exited"


def test_an_error_is_one_line_and_the_check_keeps_what_it_found() -> None:
    first, second = run_check("title", f"{PLACE}:raising", DoctorOptions())
    assert first.state == "ok"
    assert second == Finding("title", "failed", "RuntimeError: CUDA error: an illegal memory access", REPORT)


def test_a_check_that_cannot_be_imported_fails() -> None:
    [finding] = run_check("title", "offspec.engine.doctor.no_such:check", DoctorOptions())
    assert finding.state == "failed" and "no_such" in finding.found


def test_closing_ends_the_process() -> None:
    news = run_checks(DoctorOptions(), checks("hanging"))
    assert isinstance(next(news), CheckStarted)
    finding = next(news)
    assert isinstance(finding, Finding)
    pid = finding.figures["pid"]
    news.close()
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the end of the process")


def test_every_check_is_there() -> None:
    assert all(callable(resolve_name(check.entry_point)) for check in CHECKS)
