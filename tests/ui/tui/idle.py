"""When an app has done all that it was told so far.

Textual's own test driver takes a process for idle that has used little of the processor for a while. So has
one that was not given any, on a machine with much to do: then it looks before all has been painted.
"""

import asyncio
import time
from typing import Any

from textual._context import active_app
from textual.app import App
from textual.message_pump import MessagePump
from textual.screen import Screen

from tests.support.waiting import PATIENCE

_LOOKS = 3  # in a row, with what is ready to run in between


async def wait_for_idle(*seconds: float) -> None:
    """In place of Textual's: until no message waits or is being handled, and all is laid out and painted."""
    app, looks, deadline = active_app.get(), 0, time.monotonic() + PATIENCE
    while looks < _LOOKS:
        await asyncio.sleep(0 if looks else 0.001)
        looks = looks + 1 if _is_idle(app) else 0
        assert time.monotonic() < deadline, "the app never comes to rest"


def _is_idle(app: App[Any]) -> bool:
    if app._exit or app._closing or app._exception is not None:
        return True
    busy = any(map(_is_busy, [app, *app._registry])) or getattr(app, "_resize_timer", None) is not None
    works = any(worker._thread_worker and not worker.is_finished for worker in app.workers)
    return not busy and not works and not _paints(app.screen)


def _is_busy(pump: MessagePump) -> bool:
    """Whether it starts, or does anything but wait for a message."""
    ready: Any = pump._message_queue.ready_event
    waits = pump._running and not ready.is_set() and bool(ready._waiters)
    return pump._task is not None and not waits


def _paints(screen: Screen[Any]) -> bool:
    """Whether something was to be laid out or painted: that is done now, and not with the next frame."""
    required = screen._layout_required or screen._scroll_required or screen._repaint_required
    if required or screen._dirty_widgets or screen._callbacks:
        screen._on_timer_update()
        return True
    return False
