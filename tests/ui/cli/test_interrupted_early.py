"""Ctrl-C while the program is still being imported."""

import os
import signal
import subprocess
import sys
from pathlib import Path

_INTERRUPTED = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
"""


def test_ctrl_c_during_the_imports_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_INTERRUPTED)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH"), os.getcwd()])])
    done = subprocess.run(
        [sys.executable, "-m", "offspec", "--version"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")  # 130 in a shell
