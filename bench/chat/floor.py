"""What no chat can beat here: a pseudo terminal's echo, an empty Textual app, and starting Python at all.

python -m bench.chat.floor echo      a program that writes back every byte it reads
python -m bench.chat.floor textual   an app of nothing but a word and a text area
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import tty
from collections.abc import Sequence
from statistics import median
from typing import Any

from bench.chat.keys import Typist, Usage, told
from bench.chat.terminal import Terminal

_READY = "ready"
_STARTS = 5


def echo() -> None:
    """Write back what is read, until there is no more."""
    tty.setraw(0)
    os.write(1, _READY.encode())
    while data := os.read(0, 1024):
        os.write(1, data)


def textual() -> None:
    """Show a word and a text area, and nothing else."""
    from textual.app import App, ComposeResult
    from textual.widgets import Label, TextArea

    class Empty(App[None]):
        def compose(self) -> ComposeResult:
            yield Label(_READY)
            yield TextArea()

    Empty().run()


def seconds_of(argv: Sequence[str], rounds: int = _STARTS) -> float:
    """Median seconds from the start of a program to its end, its output thrown away."""
    spent = []
    for _ in range(rounds):
        start = time.perf_counter()
        subprocess.run(argv, stdout=subprocess.DEVNULL, check=True)
        spent.append(time.perf_counter() - start)
    return median(spent)


def measure(keys: int, idle_seconds: float) -> dict[str, Any]:
    """The floors: seconds of starting, of keys, and of a processor that has nothing to do."""
    found: dict[str, Any] = {
        "python_seconds": round(seconds_of([sys.executable, "-c", "pass"]), 3),
        "textual_import_seconds": round(
            seconds_of([sys.executable, "-c", "import textual.app; from textual.widgets import TextArea"]), 3
        ),
    }
    for name in ("echo", "textual"):
        with Terminal([sys.executable, "-m", "bench.chat.floor", name]) as terminal:
            first = terminal.wait_for(_READY, 30) - terminal.started
            terminal.read_until(time.perf_counter() + 0.5)
            before = Usage.of(terminal.pid)
            terminal.read_until(time.perf_counter() + idle_seconds)
            idle = Usage.of(terminal.pid).since(before)
            pressed = Typist(terminal).type(keys)
        found[name] = {"first_frame_seconds": round(first, 3), "idle": idle, "keys": told(pressed)}
    return found


if __name__ == "__main__":
    {"echo": echo, "textual": textual}[sys.argv[1]]()
