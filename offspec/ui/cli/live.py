"""The one moving thing on stderr: a progress bar or a status line, or nothing where it would be noise."""

from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.markup import escape

from offspec.core.events import LoadProgress

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID
    from rich.status import Status


class Live(Protocol):
    """At most one bar or line at a time; `stop` takes it away."""

    def progress(self, event: LoadProgress) -> None: ...

    def status(self, text: str) -> None: ...

    def stop(self) -> None: ...


def open_live(console: Console, *, wanted: bool) -> Live:
    """Movement for a real terminal. FORCE_COLOR alone does not make one: colour is not movement."""
    return _Moving(console) if wanted and not console.is_dumb_terminal else _Still()


class _Still:
    def progress(self, event: LoadProgress) -> None:
        pass

    def status(self, text: str) -> None:
        pass

    def stop(self) -> None:
        pass


class _Moving:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._line: Status | None = None

    def progress(self, event: LoadProgress) -> None:
        if self._bars is None:
            self.stop()
            self._bars = _bars(self._console)
            self._bars.start()
        if event.stage not in self._tasks:
            self._tasks[event.stage] = self._bars.add_task(
                escape(event.stage), total=event.total or None, amount=""
            )
        task = self._tasks[event.stage]
        self._bars.update(task, completed=event.done, total=event.total or None)
        self._bars.update(task, amount=_amount(event, self._bars.tasks[task].speed))

    def status(self, text: str) -> None:
        if self._line is None:
            self.stop()
            self._line = self._console.status(escape(text))
            self._line.start()
        else:
            self._line.update(escape(text))

    def stop(self) -> None:
        if self._bars is not None:
            self._bars.stop()
        if self._line is not None:
            self._line.stop()
        self._bars, self._line = None, None
        self._tasks = {}


def _bars(console: Console) -> "Progress":
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


def _amount(event: LoadProgress, speed: float | None) -> str:
    detail = f", {event.detail}" if event.detail else ""
    if event.unit != "bytes":
        return f"{event.done} of {event.total} {event.unit}{detail}"
    rate = f", {speed / 1e9:.2f} GB/s" if speed else ""
    return f"{event.done / 1e9:.2f} of {event.total / 1e9:.2f} GB{rate}{detail}"
