"""Output streams of a command: standard output, and a live line on stderr.

Standard output is flushed at every write, and a closed pipe is detected. If stderr is a terminal, it shows a
progress bar or a status line.
"""

import errno
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from rich.markup import escape

from offspec.core.errors import DiskFullError, RequestError
from offspec.core.events import LoadProgress
from offspec.ui import terminal
from offspec.ui.cli.console import Console
from offspec.ui.printable import printable
from offspec_planners.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID
    from rich.status import Status


class StdoutClosed(Exception):
    """The reader closed standard output (`offspec … | head -1`): stop without a message."""


class StdoutWriter:
    """Unbuffered writer to standard output.

    Raises RequestError if there is no standard output, StdoutClosed if its reader closed it, and
    DiskFullError if it is a file on a full disk.
    """

    def __init__(self) -> None:
        if sys.stdout is None:
            raise RequestError(
                "standard output is closed, so no answer can be written; reopen or redirect it"
            )
        self._stream = sys.stdout
        self.is_terminal = sys.stdout.isatty()
        self._at_line_start = True

    def write(self, text: str) -> None:
        """Write and flush at once, so that a pipe receives every token immediately."""
        self.write_styled(printable(text) if self.is_terminal else text)

    def write_styled(self, text: str) -> None:
        """Write text of our own, in which control characters such as colours take effect."""
        if not text:
            return
        encoding = self._stream.encoding or "utf-8"
        text = text.encode(encoding, errors="replace").decode(encoding)
        try:
            self._stream.write(text)
            self._stream.flush()
        except BrokenPipeError:
            raise StdoutClosed from None
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            abandon_stdout()
            raise DiskFullError("standard output is a file on a full disk; free some space there") from None
        self._at_line_start = text.endswith("\n")

    def end_line(self) -> None:
        """Start a new line unless the output is already at the start of one."""
        if not self._at_line_start:
            self.write("\n")


def abandon_stdout() -> None:
    """Discard buffered output, because the interpreter flushes again at exit and would print an error."""
    with suppress(OSError, ValueError):  # not a real file under a test
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class LiveLine:
    """Live line on stderr: at most one progress bar or status line at a time, removed by `stop`.

    Args:
        console: Console of stderr.
        wanted: Whether to animate at all. A terminal that cannot move its cursor never animates, and
            FORCE_COLOR alone does not count as a terminal.
    """

    def __init__(self, console: Console, *, wanted: bool) -> None:
        self._console = console
        self._animated = wanted and not console.is_dumb_terminal
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._line: Status | None = None

    def progress(self, event: LoadProgress) -> None:
        if not self._animated:
            return
        if self._bars is None:
            self.stop()
            self._bars = _bars(self._console)
            terminal.set_restore_sequence(terminal.LINE)
            self._bars.start()
        if event.stage not in self._tasks:
            self._tasks[event.stage] = self._bars.add_task(
                escape(printable(event.stage)), total=event.total or None, amount=""
            )
        task = self._tasks[event.stage]
        self._bars.update(task, completed=event.done, total=event.total or None)
        shown = self._bars.tasks[task]
        self._bars.update(task, amount=_amount(event, shown.speed, shown.time_remaining))

    def status(self, text: str) -> None:
        if not self._animated:
            return
        if self._line is None:
            self.stop()
            self._line = self._console.status("")
            terminal.set_restore_sequence(terminal.LINE)
            self._line.start()
        self._line.update(escape(printable(text)))

    def stop(self) -> None:
        for moving in (self._bars, self._line):
            if moving is not None:
                moving.stop()
        if self._animated:
            terminal.set_restore_sequence("")
        self._bars = self._line = None
        self._tasks = {}


def _bars(console: Console) -> "Progress":
    from rich.progress import BarColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        console=console,
        transient=True,
    )


def _amount(event: LoadProgress, speed: float | None, remaining: float | None) -> str:
    """Format the progress of a stage, with rate and remaining time if known."""
    shown = escape(printable(event.detail))
    detail = f", {shown}" if shown else ""
    left = f", {format_seconds(remaining, 0)} left" if remaining else ""
    if not event.total:
        return shown
    if event.unit != "bytes":
        return f"{event.done} of {event.total} {event.unit}{left}{detail}"
    rate = f", {format_rate(speed)}" if speed else ""
    return f"{format_bytes(event.done)} of {format_bytes(event.total)}{rate}{left}{detail}"
