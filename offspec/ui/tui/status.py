"""The lines around the conversation: model, load, what the machine is doing, how full the context is."""

import time
from collections.abc import Callable
from pathlib import PurePath
from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.widgets import Static

from offspec.core.events import LoadProgress
from offspec.ui.tui.steady_text import SteadyText
from offspec_planners.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from offspec.ui.chat.controller import ChatController

_CELLS, _LOADING_CELLS = 8, 24  # of the meter, and of the bar of a load
_NARROW = 60


class Header(SteadyText):
    """The model, its draft, and the title of the conversation."""

    def __init__(self, model: str) -> None:
        super().__init__(_short(model), id="header")

    def update_from(self, controller: "ChatController") -> None:
        engine, title = controller.engine, controller.session.conversation.title
        parts = (_short(engine.config.model), f"draft {_short(engine.draft)}", title)
        self.show(" · ".join(part for part in parts if part))


def _short(model: str) -> str:
    """The last part of a path; a hub id keeps its owner."""
    return PurePath(model).name if model.startswith(("/", ".", "~")) or model.count("/") > 1 else model


class StatusLine(Horizontal):
    """The line above the composer."""

    def compose(self) -> ComposeResult:
        yield SteadyText(id="doing")
        yield Static("↓ more below", id="below", markup=False)
        yield SteadyText(id="meter", by_width=True)

    def on_mount(self) -> None:
        self.more_below(False)

    def more_below(self, there_is: bool) -> None:
        """Whether the conversation goes on below what is shown."""
        self.query_one("#below").display = there_is

    def doing(self, text: str) -> None:
        """What is being done, or a hint; the latest stays."""
        self.query_one("#doing", SteadyText).show(text)

    def context(self, used: int, room: int) -> None:
        """used: tokens of the conversation, of the `room` that there are."""
        text = meter(used, room, narrow=self.app.size.width < _NARROW)
        self.query_one("#meter", SteadyText).show(text)


def meter(used: int, room: int, *, narrow: bool = False) -> str:
    """How full the context is. Anything above nothing shows."""
    share = min(1.0, used / room) if room else 0.0
    if narrow:
        return f"{share:.0%}"
    full = max(round(share * _CELLS), 1 if used else 0)
    return f"{used:,} of {room:,} tokens {'▰' * full}{'▱' * (_CELLS - full)}"


class LoadingView(SteadyText):
    """Moves ten times a second, whether or not there is news, so that the wait is seen to be one."""

    def __init__(self, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(id="loading", by_width=True)  # lines as wide as before wrap as before
        self._clock = clock
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

    def update_from(self, event: LoadProgress) -> None:
        """Show this from the next tick on."""
        if self._event is None or event.stage != self._event.stage:
            self._stage_began, self._first = self._clock(), event.done
        self._event = event

    def tick(self) -> None:
        self.show(self.text(self._clock()))

    def text(self, now: float) -> str:
        """Lines as of `now`, in the clock's seconds."""
        title = f"loading {self._model} · {format_seconds(now - self._began, 1)}"
        event = self._event
        if event is None:
            return title
        if not event.total:
            return f"{title}\n{event.stage}"
        share = min(1.0, event.done / event.total)
        full = int(share * _LOADING_CELLS)
        bar = f"{'▰' * full}{'▱' * (_LOADING_CELLS - full)} {share:.0%}"
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
