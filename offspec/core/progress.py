"""Progress events for work that is measured in bytes."""

from __future__ import annotations

from collections.abc import Callable

from offspec.core.events import Event, LoadProgress

_STEPS = 1000


class ByteProgress:
    """Counter of processed bytes that sends an event for each thousandth of the total.

    done: bytes already processed at the start. detail: further text of the events, such as the current layer.
    """

    def __init__(self, stage: str, total: int, notify: Callable[[Event], None], done: int = 0) -> None:
        self.detail = ""
        self._stage, self._total, self._notify = stage, total, notify
        self._done = done
        self._sent = -1
        self.add(0)

    def add(self, count: int) -> None:
        """Add to the processed bytes."""
        self._done += count
        share = _STEPS * self._done // max(1, self._total)
        if share > self._sent:
            self._sent = share
            self._notify(LoadProgress(self._stage, self._done, self._total, "bytes", self.detail))
