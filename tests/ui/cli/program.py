"""The program in a process of its own, and the one line in which it tells an error."""

import os
import subprocess
import sys
from pathlib import Path

from typer.testing import Result

ROOT = Path(__file__).parents[3]
DRIVER = ROOT / "tests" / "support" / "fake_loading.py"
HEAVY = "torch transformers numpy huggingface_hub safetensors gguf accelerate bitsandbytes textual"
PATIENCE = 30  # seconds until a hanging child fails its test


def environment(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "NO_COLOR")}
    return {**kept, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **extra}


def start(script: str, *args: str, stderr: int = subprocess.PIPE, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(DRIVER), script, *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=environment(**env),
    )


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment(), timeout=PATIENCE
    )


def error_line(result: Result) -> str:
    """The one line that begins with `error:`, after checking that it is alone."""
    lines = [line for line in result.stderr.splitlines() if not line.startswith("[")]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    return lines[0]
