"""How long a key takes to the screen, and what the program uses meanwhile."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.chat.terminal import Terminal

# Letters of one column that no answer has in it, so that the first one seen is the key's own echo.
# (Canadian syllabics; a terminal would show them, though this one shows nothing.)
_LETTERS = [chr(code) for code in range(0x1403, 0x1403 + 480)]
_ON_A_LINE = 40
_BACKSPACE = "\x7f"
LATE_SECONDS = 0.05
_TOLD = 8  # of the late keys, how many are told with their moments
_LOST_SECONDS = 10.0  # a key that is not shown by then counts as this late
_SETTLE_SECONDS = 0.3


def percentile(values: Sequence[float], share: float) -> float:
    """The least of the values that at least `share` of them do not exceed; 0 where there are none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


@dataclass(frozen=True, slots=True)
class Key:
    """One key: when it was pressed, in seconds since the program was started, and how long it took."""

    pressed: float
    delay: float


def told(keys: Sequence[Key]) -> dict[str, Any]:
    """What is said of many keys: shares of their delays in milliseconds, and when the worst were pressed."""
    delays = [key.delay for key in keys]
    worst = sorted((key for key in keys if key.delay > LATE_SECONDS), key=lambda key: -key.delay)
    return {
        "keys": len(keys),
        **{
            f"{name}_ms": round(1e3 * percentile(delays, share), 2)
            for name, share in (("median", 0.5), ("p95", 0.95), ("p99", 0.99), ("max", 1.0))
        },
        "late": len(worst),
        "latest": [[round(key.pressed, 2), round(1e3 * key.delay)] for key in worst[:_TOLD]],
    }


class Typist:
    """Types single letters at random moments, and takes them back when a line is full.

    The moments do not depend on the program, `gap` seconds apart on average: a key does not wait for the one
    before it, so that a program which stands still for a second is caught at it by every key of that second.
    """

    def __init__(self, terminal: Terminal, seed: int = 1, gap: float = 0.15) -> None:
        self._terminal = terminal
        self._random = random.Random(seed)
        self._gap = gap
        self._typed = 0
        self._on_the_line = 0

    def type(self, count: int, going_on: Callable[[], bool] = lambda: True) -> list[Key]:
        """Press up to `count` keys, as long as `going_on` says so, and wait until all are shown."""
        terminal = self._terminal
        pressed: dict[str, float] = {}
        keys: list[Key] = []
        moment = time.perf_counter()
        while len(keys) + len(pressed) < count and going_on():
            if self._on_the_line == _ON_A_LINE:
                keys += self._collect(pressed)
                self.take_back()
                moment = time.perf_counter()
            moment += self._random.uniform(0.2, 1.8) * self._gap
            terminal.read_until(moment)
            letter = _LETTERS[self._typed % len(_LETTERS)]
            self._typed += 1
            self._on_the_line += 1
            terminal.expect(letter)
            pressed[letter] = terminal.press(letter)
        return keys + self._collect(pressed)

    def take_back(self) -> None:
        """Remove the letters from the line."""
        self._terminal.press(_BACKSPACE * self._on_the_line)
        self._on_the_line = 0
        self._terminal.read_until(time.perf_counter() + _SETTLE_SECONDS)

    def _collect(self, pressed: dict[str, float]) -> list[Key]:
        """All keys that were pressed, when the last of them is shown or lost."""
        keys = []
        for letter, at in pressed.items():
            while (shown := self._terminal.shown_at(letter)) is None:
                if time.perf_counter() > at + _LOST_SECONDS:
                    shown = at + _LOST_SECONDS
                    break
                self._terminal.read_until(time.perf_counter() + 0.05, once=True)
            self._terminal.forget(letter)
            keys.append(Key(at - self._terminal.started, shown - at))
        pressed.clear()
        return keys


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor seconds that a process has used by a moment of time.perf_counter.

    ui: of its main thread, where the terminal UI runs; process: of all its threads.
    """

    moment: float
    ui: float
    process: float

    @classmethod
    def of(cls, pid: int) -> Usage:
        # The thread's own file counts in nanoseconds; that of the process in hundredths of a second.
        ui = int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        return cls(time.perf_counter(), ui, ticks / os.sysconf("SC_CLK_TCK"))

    def since(self, earlier: Usage) -> dict[str, float]:
        """Shares of a core from `earlier` to here."""
        seconds = self.moment - earlier.moment
        return {
            "seconds": round(seconds, 2),
            "ui_of_a_core": round((self.ui - earlier.ui) / seconds, 4),
            "process_of_a_core": round((self.process - earlier.process) / seconds, 3),
        }


def has_loaded(pid: int, library: str) -> bool:
    """Whether a process has mapped a file whose name has `library` in it."""
    return library in Path(f"/proc/{pid}/maps").read_text()
