"""What `make env` would do, shown by make without doing it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def shown(venv: Path, *words: str) -> str:
    variables = {"PATH": os.environ["PATH"]}
    command = ["make", "--dry-run", f"VENV={venv}", *words]
    return subprocess.run(command, cwd=ROOT, env=variables, check=True, capture_output=True, text=True).stdout


def test_the_build_of_torch_is_chosen(tmp_path: Path) -> None:
    assert "--extra-index-url https://download.pytorch.org/whl/cpu torch" in shown(tmp_path, "env")
    assert "whl/cu126 torch" in shown(tmp_path, "env", "TORCH=cu126")
    assert "--extra-index-url" not in shown(tmp_path, "env", "TORCH=cuda")  # PyPI has that build


def test_another_build_takes_the_place_of_the_one_that_is_installed(tmp_path: Path) -> None:
    (tmp_path / ".installed").touch()
    changed = shown(tmp_path, "env", "TORCH=cuda")
    assert "pip uninstall --quiet --yes torch" in changed and "touch" in changed
    (tmp_path / ".installed").rename(tmp_path / ".installed-cuda")
    assert "pip" not in shown(tmp_path, "test")  # which stays
    assert "whl/cpu torch" in shown(tmp_path, "env", "TORCH=cpu")


@pytest.mark.parametrize("goal", ["env", "demo"])
def test_it_says_how_the_commands_are_found(tmp_path: Path, goal: str) -> None:
    (tmp_path / ".installed").touch()
    assert f"source {tmp_path}/bin/activate" in shown(tmp_path, goal)
    assert "activate" not in shown(tmp_path, "test")
