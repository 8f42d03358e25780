"""A disk that is really full: a small tmpfs in a mount namespace of the test."""

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.support.tiny_models import write_model
from tests.support.waiting import PATIENCE
from tests.ui.cli.program import environment

ENGINE = ("--device", "cpu", "--memory", "2GB", "--context", "128", "--draft", "none", "--dtype", "float32")
MOUNT = 'mount -t tmpfs -o size="$2" none "$1" && mkdir "$1/filled" || exit 99; '
FILL = 'cat /dev/zero > "$1/filled/zeros" 2> /dev/null; '
RUN = 'disk=$1; shift 2; "$@"; code=$?; ls -A "$disk" > "$disk.list"; exit $code'


@cache
def may_mount() -> bool:
    try:
        return subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]).returncode == 0
    except OSError:
        return False


pytestmark = pytest.mark.skipif(not may_mount(), reason="this user may not mount a tmpfs")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "model"
    return write_model(folder, hidden_size=128, intermediate_size=256, num_hidden_layers=2)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def run(
    disk: Path, size: str, *words: str, full: bool = False, input: str = "", **variables: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the program with this much space on a disk, none if full; return the result and the files on it."""
    script = MOUNT + (FILL if full else "") + RUN
    command = ["unshare", "-rm", "sh", "-c", script, "sh", str(disk), size, sys.executable, "-m", "offspec"]
    here = {"OFFSPEC_CACHE": str(disk.parent / "cache"), "OFFSPEC_DATA": str(disk.parent / "data")}
    done = subprocess.run(
        [*command, *words],
        input=input,
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE,
        env=environment(**here | variables),
    )
    return done, Path(f"{disk}.list").read_text().split()


@pytest.mark.exhaustive
def test_pack_on_a_full_disk(model: Path, disk: Path) -> None:
    done, left = run(disk, "300k", "pack", str(model), "--to", "int8", "--out", str(disk / "pack"), "--quiet")
    assert done.returncode == 1 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and "Traceback" not in line
    assert left == ["filled"]


@pytest.mark.exhaustive
def test_answer_without_space_for_its_plan(model: Path, disk: Path) -> None:
    cache = str(disk / "cache")
    done, _ = run(disk, "1m", "generate", str(model), "w5", *ENGINE, full=True, OFFSPEC_CACHE=cache)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and "Traceback" not in done.stderr


@pytest.mark.exhaustive
def test_chat_without_space_to_save(model: Path, disk: Path) -> None:
    data = str(disk / "data")
    done, left = run(
        *(disk, "1m", "chat", str(model), "--plain", "--max-tokens", "4", *ENGINE, "--quiet"),
        full=True,
        input="w5 w6\nw7\n",
        OFFSPEC_DATA=data,
    )
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 2
    assert done.stderr.count("the conversation is not being saved: the disk is full") == 1
    assert "Traceback" not in done.stderr and left == ["data", "filled"]


@pytest.mark.exhaustive
def test_batch_on_a_full_disk(model: Path, disk: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": "a", "prompt": "w5", "sampling_params": {"max_tokens": 2}}\n')
    out = str(disk / "out.jsonl")
    words = "batch", str(tmp_path / "in.jsonl"), out, str(model), *ENGINE, "--quiet"
    done, left = run(disk, "1m", *words, full=True)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and "out.jsonl" in line
    assert left in (["filled"], ["filled", "out.jsonl"])
