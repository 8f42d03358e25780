"""Lines around the conversation: model, loading progress, current activity, use of the context."""

import time
from collections.abc import Callable
from pathlib import PurePath
from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.widgets import Static

from offspec.core.events import LoadProgress
from offspec.ui.tui.cached_text import CachedText
from offspec_planners.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from offspec.ui.chat.controller import ChatController

_CELLS, _LOADING_CELLS = 8, 24  # cells of the context meter, and of the loading bar
_NARROW = 60


class Header(CachedText):
    """Header line: model, draft, and title of the conversation."""

    def __init__(self, model: str) -> None:
        super().__init__(_short(model), id="header")

    def update_from(self, controller: "ChatController") -> None:
        engine, title = controller.engine, controller.session.conversation.title
        parts = (_short(engine.config.model), f"draft {_short(engine.draft)}", title)
        self.show(" · ".join(part for part in parts if part))


def _short(model: str) -> str:
    """Return the last part of a path, or a Hugging Face id unchanged."""
    return PurePath(model).name if model.startswith(("/", ".", "~")) or model.count("/") > 1 else model


class StatusLine(Horizontal):
    """Status line above the composer."""

    def compose(self) -> ComposeResult:
        yield CachedText(id="doing")
        yield Static("↓ more below", id="below", markup=False)
        yield CachedText(id="meter", by_width=True)

    def on_mount(self) -> None:
        self.set_more_below(False)

    def set_more_below(self, there_is: bool) -> None:
        """Show or hide the mark for more text below the visible part."""
        self.query_one("#below").display = there_is

    def set_status(self, text: str) -> None:
        """Show the current activity or a hint, until the next call."""
        self.query_one("#doing", CachedText).show(text)

    def set_context(self, used: int, room: int) -> None:
        """Show the use of the context: `used` of `room` tokens."""
        text = context_meter(used, room, narrow=self.app.size.width < _NARROW)
        self.query_one("#meter", CachedText).show(text)


def context_meter(used: int, room: int, *, narrow: bool = False) -> str:
    """Return a meter of the context. Any use above 0 fills at least one cell."""
    share = min(1.0, used / room) if room else 0.0
    if narrow:
        return f"{share:.0%}"
    full = max(round(share * _CELLS), 1 if used else 0)
    return f"{used:,} of {room:,} tokens {'▰' * full}{'▱' * (_CELLS - full)}"


class LoadingView(CachedText):
    """Loading progress, updated ten times a second even without news, to show that the program is running."""

    def __init__(self, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(id="loading", by_width=True)  # lines of the same width wrap in the same way
        self._clock = clock
        self._set(model)

    def on_mount(self) -> None:
        self._timer = self.set_interval(0.1, self.tick)
        self.tick()

    def begin(self, model: str) -> None:
        """Begin a load."""
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
        self._first = 0  # amount done at the first event of the stage

    def update_from(self, event: LoadProgress) -> None:
        """Set the event shown from the next tick on."""
        if self._event is None or event.stage != self._event.stage:
            self._stage_began, self._first = self._clock(), event.done
        self._event = event

    def tick(self) -> None:
        self.show(self.text(self._clock()))

    def text(self, now: float) -> str:
        """Return the lines at time `now`, in seconds of the clock."""
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
