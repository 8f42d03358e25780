"""The command that reads changed files: `python -m tests.fuzz`, whose many cases are no part of the suite."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.exhaustive
def test_one_changed_file_of_each_kind() -> None:
    command = [sys.executable, "-m", "tests.fuzz", "15"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1] == "15 cases of seed 0, 0 failures"
