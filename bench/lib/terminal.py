"""A program in a pseudo terminal, used like a person would: sending keys and reading output bytes."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Self

_SIZE = struct.pack("HHHH", 30, 100, 0, 0)  # rows, columns


class Terminal:
    """A program in its own pseudo terminal, killed at the end of a `with` block if it is still running.

    started: start time, by time.perf_counter. ended: whether the program closed its end.
    """

    def __init__(self, program: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self.ended = False
        self.started = time.perf_counter()
        self.pid, self.end = pty.fork()
        if self.pid == 0:
            os.execvpe(program[0], list(program), dict(env or os.environ))
        fcntl.ioctl(self.end, termios.TIOCSWINSZ, _SIZE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.end)

    def press(self, keys: str) -> float:
        """Send keys; return the time."""
        at = time.perf_counter()
        os.write(self.end, keys.encode())
        return at

    def read(self, seconds: float) -> bytes:
        """Return the program's output of up to `seconds`; empty if there is none, or if it has ended."""
        if not select.select([self.end], [], [], seconds)[0]:
            return b""
        data = b""
        with suppress(OSError):  # raised by Linux once the other end is closed
            data = os.read(self.end, 1 << 16)
        self.ended = not data
        return data
