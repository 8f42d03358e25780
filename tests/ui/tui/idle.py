"""Detects when an app is idle.

Textual's own test driver assumes that a process which used little processor time is idle. On a busy machine a
process may get no processor time, and the driver looks before everything is painted.
"""

import asyncio
import time
from typing import Any

from textual._context import active_app
from textual.app import App
from textual.message_pump import MessagePump
from textual.screen import Screen

from tests.support.waiting import PATIENCE

_LOOKS = 3  # checks in a row, between which ready callbacks run


async def wait_for_idle(*seconds: float) -> None:
    """Replaces Textual's: wait until no message is pending and everything is laid out and painted."""
    app, looks, deadline = active_app.get(), 0, time.monotonic() + PATIENCE
    while looks < _LOOKS:
        await asyncio.sleep(0 if looks else 0.001)
        looks = looks + 1 if _is_idle(app) else 0
        assert time.monotonic() < deadline, "the app is never idle"


def _is_idle(app: App[Any]) -> bool:
    if app._exit or app._closing or app._exception is not None:
        return True
    busy = any(map(_is_busy, [app, *app._registry])) or getattr(app, "_resize_timer", None) is not None
    works = any(worker._thread_worker and not worker.is_finished for worker in app.workers)
    return not busy and not works and not _paints(app.screen)


def _is_busy(pump: MessagePump) -> bool:
    """Return whether it is starting, or doing anything other than waiting for a message."""
    ready: Any = pump._message_queue.ready_event
    waits = pump._running and not ready.is_set() and bool(ready._waiters)
    return pump._task is not None and not waits


def _paints(screen: Screen[Any]) -> bool:
    """Lay out and paint now what the next frame would; return whether anything was pending."""
    required = screen._layout_required or screen._scroll_required or screen._repaint_required
    if required or screen._dirty_widgets or screen._callbacks:
        screen._on_timer_update()
        return True
    return False
