"""The program in a process of its own, its input, and its error line."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, AnyStr

from typer.testing import Result

from offspec.core.events import LoadProgress
from tests.support.waiting import PATIENCE

ROOT = Path(__file__).parents[3]
DRIVER = "tests.ui.cli.scripted_program"
TEXT = "The sky is truly blue [really]."
LOADING = (LoadProgress("opening [model]", 1, 2, "files"), LoadProgress("unpacking", 10**9, 2 * 10**9))
HEAVY = "torch transformers numpy huggingface_hub safetensors gguf accelerate bitsandbytes textual"
# 256 passes: longer than a test waits before it interrupts.
ENDLESS = {"answers": ["".join(f"line {i}\n" for i in range(200))], "pass_tokens": 1, "delay": 0.1}


class Child(subprocess.Popen[AnyStr]):
    """A process that is killed if its test fails, or after a while, so that no reader hangs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limit = threading.Timer(2 * PATIENCE, self.kill)
        self._limit.daemon = True
        self._limit.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.kill()
        super().__exit__(kind, error, trace)
        self._limit.cancel()


def environment(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "NO_COLOR")}
    return {**kept, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **extra}


def start(
    *args: str, script: dict[str, Any] | None = None, stderr: int = subprocess.PIPE, **env: str
) -> Child[str]:
    return Child(
        [sys.executable, "-m", DRIVER, json.dumps({"loud": True, **(script or {})}), *args],
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
    """Return the one line that begins with `error:`, after checking that it is alone."""
    lines = [line for line in result.stderr.splitlines() if not line.startswith("[")]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    return lines[0]
