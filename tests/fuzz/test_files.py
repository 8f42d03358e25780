"""Mutated files of every kind end in an answer or in one line: no traceback, no hang, no abort."""

from pathlib import Path

import pytest

from tests.fuzz.pool import run
from tests.fuzz.surfaces import write_bases

CASES = 300  # more by hand: python -m tests.fuzz


@pytest.mark.exhaustive
def test_mutated_files(tmp_path: Path) -> None:
    write_bases(tmp_path)
    report = run(range(CASES), 0, tmp_path)
    assert not report.failures, "\n\n".join(report.failures)
    assert report.ends.total() == CASES
