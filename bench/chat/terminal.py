"""A pseudo terminal with a program in it, as a person sits before it: keys go in, bytes come out, each timed.

The reading side answers what a terminal answers. A program that asks for synchronised output gets it, and
then what it writes counts as shown when its update is closed, as a terminal would show it.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

from bench.lib.cgroup import BenchError
from bench.lib.process import ROOT

COLUMNS, ROWS = 100, 30
# What Textual asks, and what a terminal says: 2 is "supported, and off now", 0 is "not known".
_ANSWERS = {b"\x1b[?2026$p": b"\x1b[?2026;2$y", b"\x1b[?2048$p": b"\x1b[?2048;0$y"}
_UPDATE_OPENS, _UPDATE_CLOSES = b"\x1b[?2026h", b"\x1b[?2026l"
_CONTROL = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b.|[\x00-\x1f]")
_KEPT_BYTES = 1 << 16  # behind what is new: as much as a mark can be away from the end of its update


def environment(**changes: str) -> dict[str, str]:
    """The environment of a program in a common terminal, with variables of one's own."""
    unset = ("NO_COLOR", "COLUMNS", "LINES")
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    return {**inherited, "TERM": "xterm-256color", "COLORTERM": "truecolor", **changes}


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """A program in a pseudo terminal of its own, which is killed at the end if it still runs.

        with Terminal([sys.executable, "-m", "offspec", "chat", "demo"]) as terminal:
            seconds = terminal.wait_for("demo", 10)

    started: when the program was started, by time.perf_counter, as are all times here. Nothing is read but
    while one of the methods waits, so a caller who does other things must be quick about it.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.started = time.perf_counter()
        self._program = subprocess.Popen(
            argv,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=ROOT,
            env=dict(env or environment()),
            start_new_session=True,
            preexec_fn=_take_terminal,  # so that it is told when this end is gone, however the bench ends
        )
        os.close(slave)
        self._seen = b""
        self._unanswered = dict(_ANSWERS)
        self._synchronised = False
        self._unshown: dict[bytes, int] = {}  # marks that are awaited: where the search goes on
        self._shown: dict[bytes, float] = {}
        self._ended = False
        self.bytes_read = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._program.poll() is None:
            self._program.kill()
        self._program.wait()
        os.close(self._master)

    @property
    def pid(self) -> int:
        return self._program.pid

    def press(self, keys: str) -> float:
        """Send keys as a terminal encodes them; returns when."""
        at = time.perf_counter()
        os.write(self._master, keys.encode())
        return at

    def expect(self, mark: str) -> None:
        """From now on, note when `mark` is first shown; `shown_at` tells."""
        self._unshown[mark.encode()] = len(self._seen)

    def shown_at(self, mark: str) -> float | None:
        """When an expected mark was shown, None if it was not yet."""
        return self._shown.get(mark.encode())

    def forget(self, mark: str) -> None:
        """A mark that is no longer waited for."""
        self._unshown.pop(mark.encode(), None)
        self._shown.pop(mark.encode(), None)

    def wait_for(self, mark: str, seconds: float) -> float:
        """Wait until `mark` is shown; returns when. Raises BenchError after `seconds`, or where it ended."""
        self.expect(mark)
        self.wait_until(lambda: self.shown_at(mark) is not None, seconds, f"{mark!r} on the screen")
        at = self.shown_at(mark)
        assert at is not None
        self.forget(mark)
        return at

    def wait_until(self, reached: Callable[[], bool], seconds: float, what: str) -> None:
        """Read until `reached` says so, which is asked after every read and 20 times a second."""
        until = time.perf_counter() + seconds
        while not reached():
            if self._ended:
                raise BenchError(f"the program ended without {what}; it last showed: {self.tail()}")
            if time.perf_counter() > until:
                raise BenchError(f"no {what} within {seconds:.0f} s; last shown: {self.tail()}")
            self.read_until(min(until, time.perf_counter() + 0.05), once=True)

    def read_until(self, moment: float, *, once: bool = False) -> None:
        """Read whatever comes until a moment of time.perf_counter; with `once`, or until something came."""
        while (left := moment - time.perf_counter()) > 0:
            if self._ended:
                time.sleep(left)
                return
            if not select.select([self._master], [], [], left)[0]:
                return
            try:
                data = os.read(self._master, 1 << 16)
            except OSError:  # Linux says so where the other side was closed
                data = b""
            at = time.perf_counter()
            self._ended = not data
            self._take(data, at)
            if once:
                return

    def tail(self, characters: int = 300) -> str:
        """The last that was written, without control sequences; for messages."""
        return repr(_CONTROL.sub(b" ", self._seen)[-characters:].decode(errors="replace"))

    def _take(self, data: bytes, at: float) -> None:
        self.bytes_read += len(data)
        self._seen += data
        self._synchronised = self._synchronised or _UPDATE_OPENS in self._seen
        for question in [asked for asked in self._unanswered if asked in self._seen]:
            os.write(self._master, self._unanswered.pop(question))
        for mark, start in list(self._unshown.items()):
            place = self._seen.find(mark, start)
            if place >= 0 and (not self._synchronised or self._seen.find(_UPDATE_CLOSES, place) >= 0):
                self._shown[mark] = at
                del self._unshown[mark]
            elif place < 0:
                self._unshown[mark] = max(start, len(self._seen) - len(mark))
        if (surplus := len(self._seen) - _KEPT_BYTES) > _KEPT_BYTES:
            self._seen = self._seen[surplus:]
            self._unshown = {mark: max(0, start - surplus) for mark, start in self._unshown.items()}
