"""What is shown while a model is being opened: the stage, a bar, the speed, and the time that is left."""

import time
from collections.abc import Callable

from rich.cells import cell_len
from textual.content import Content
from textual.widgets import Static

from offspec.core.events import LoadProgress
from offspec.ui.printable import printable
from offspec_planners.units import format_bytes, format_seconds

_CELLS = 24


class LoadingView(Static):
    """Moves ten times a second, whether or not there is news, so that the wait is seen to be one."""

    def __init__(self, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(markup=False, id="loading")
        self._clock = clock
        self._widths: list[int] = []  # of the lines that are shown
        self._set(model)

    def on_mount(self) -> None:
        self._timer = self.set_interval(0.1, self.tick)
        self.tick()

    def begin(self, model: str) -> None:
        """Another load begins."""
        self._set(model)
        self.display = True
        self._timer.resume()

    def end(self) -> None:
        self.display = False
        self._timer.pause()

    def _set(self, model: str) -> None:
        self._model = model
        self._began = self._stage_began = self._clock()
        self._event: LoadProgress | None = None
        self._first = 0  # done when the stage was first heard of

    def show(self, event: LoadProgress) -> None:
        if self._event is None or event.stage != self._event.stage:
            self._stage_began, self._first = self._clock(), event.done
        self._event = event

    def tick(self) -> None:
        text = printable(self.text(self._clock()))
        before, self._widths = self._widths, [cell_len(line) for line in text.split("\n")]
        self.update(Content(text), layout=self._widths != before)  # lines as wide as before wrap as before

    def text(self, now: float) -> str:
        """Lines as of `now`, in the clock's seconds."""
        title = f"loading {self._model} · {format_seconds(now - self._began, 1)}"
        event = self._event
        if event is None:
            return title
        if not event.total:
            return f"{title}\n{event.stage}"
        share = min(1.0, event.done / event.total)
        full = int(share * _CELLS)
        bar = f"{'▰' * full}{'▱' * (_CELLS - full)} {share:.0%}"
        return "\n".join((title, event.stage, bar, self._amount(event, now - self._stage_began)))

    def _amount(self, event: LoadProgress, seconds: float) -> str:
        gone = event.done - self._first
        rate = gone / seconds if seconds > 0.2 else 0.0
        remaining = event.total - event.done
        left = f" · {format_seconds(remaining / rate, 0)} left" if rate and remaining > 0 else ""
        detail = f" · {event.detail}" if event.detail else ""
        if event.unit != "bytes":
            return f"{event.done:,} of {event.total:,} {event.unit}{left}{detail}"
        speed = f" · {rate / 1e9:.2f} GB/s" if rate else ""
        return f"{format_bytes(event.done)} of {format_bytes(event.total)}{speed}{left}{detail}"
