"""Handling of Ctrl-C, from the first key press to the end of the process.

Python raises KeyboardInterrupt between any two instructions. Some code cannot be interrupted safely: a half
imported module stays so, rich loses track of its display, and exceptions in `__del__` are only printed. In
such code the interrupt is deferred. If it stays deferred too long, or if the user presses Ctrl-C again
because the command takes too long to end, the process ends at once: it removes unfinished files and restores
the terminal.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from offspec.core.files import remove_partial_files
from offspec.ui import terminal

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

CODE = 128 + signal.SIGINT  # exit code, as in a shell

_RETRY_S = 0.02
_PATIENCE_S = 0.5  # maximum time that an interrupt is deferred
_ONE_HAND_S = 1.0  # a second Ctrl-C within this time is ignored
# Packages whose state an interrupted call would break.
_INDIVISIBLE = {"importlib", "rich", "textual", "weakref", "_weakrefset"}
_SHORT = {"__enter__", "__exit__", "__del__"}  # functions that pair an action with its reversal


@dataclass(slots=True)
class _State:
    """State of the interrupt handler.

    Args:
        active: Whether a command is running.
        pending_since: Time of the deferred interrupt, or None.
        raised_at: Time when an interrupt was raised as KeyboardInterrupt, or None.
        reported: Whether the user was informed that the command was stopped.
        handler: Function to call instead of ending the command, or None.
    """

    active: bool = False
    pending_since: float | None = None
    raised_at: float | None = None
    reported: bool = False
    handler: Callable[[], object] | None = None


_state = _State()


def listen() -> None:
    """Install the handler of Ctrl-C, unless Ctrl-C is ignored, as under nohup.

    Outside of `command`, Ctrl-C ends the process. Signals that end the process remove its unfinished files
    first.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGALRM, _on_signal)
        signal.signal(signal.SIGINT, _on_signal)
        sys.unraisablehook = _unraisable
    for signum in (signal.SIGTERM, signal.SIGHUP):  # closing a terminal sends SIGHUP
        if signal.getsignal(signum) is signal.SIG_DFL:
            signal.signal(signum, _end)


@contextmanager
def command() -> Iterator[None]:
    """Have Ctrl-C raise KeyboardInterrupt in the block, once."""
    _state.active = True
    try:
        yield
    finally:
        _state.active = False


@contextmanager
def override_handler(do: Callable[[], object]) -> Iterator[None]:
    """Have the first Ctrl-C in the block call `do`, and only the next one raise KeyboardInterrupt.

    This also works without `listen`.
    """
    before, handler = _state.handler, signal.getsignal(signal.SIGINT)
    _state.handler = do
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda signum, frame: _handle_pending())
    try:
        yield
    finally:
        _state.handler = before
        if handler is signal.default_int_handler:
            signal.signal(signal.SIGINT, handler)


def pending_interrupt() -> KeyboardInterrupt:
    """Return the exception to raise for an interrupt that `override_handler` deferred."""
    end_on_interrupt()
    return KeyboardInterrupt()


def end_on_interrupt() -> None:
    """Record that an interrupt ends the command now, as if KeyboardInterrupt had been raised."""
    _state.raised_at = time.monotonic()


def mark_reported() -> None:
    """Record that the user was informed that the command was stopped."""
    _state.reported = True


def exit_interrupted() -> None:
    """End the process now, after Ctrl-C."""
    end_now(CODE, "" if _state.reported or not _state.active else "stopped\n")


def end_now(code: int, text: str = "") -> NoReturn:
    """Remove unfinished files, restore the terminal, and end the process.

    Args:
        code: Exit code.
        text: Text written to stderr.
    """
    _clean_up(text)
    os._exit(code)


def _clean_up(text: str = "") -> None:
    remove_partial_files()  # first: with the terminal gone, writing to it may never return
    terminal.restore_terminal(text)


def _on_signal(signum: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C, and the alarm that retries a deferred interrupt, in the main thread."""
    now = time.monotonic()
    if signum == signal.SIGALRM and _state.pending_since is None:
        return
    if not _state.active or (_state.raised_at is not None and now - _state.raised_at > _ONE_HAND_S):
        exit_interrupted()
    if _state.raised_at is not None:
        return
    _state.pending_since = _state.pending_since or now
    if _state.handler is not None or not _is_indivisible(frame):
        _handle_pending()
    elif now - _state.pending_since > _PATIENCE_S:
        exit_interrupted()
    else:
        signal.setitimer(signal.ITIMER_REAL, _RETRY_S)


def _end(signum: int, frame: FrameType | None) -> None:
    """Remove unfinished files and end as the signal would."""
    _clean_up()
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


def _handle_pending() -> None:
    _state.pending_since = None
    if (do := _state.handler) is not None:
        _state.handler = None
        do()
        return
    raise pending_interrupt()


def _is_indivisible(frame: FrameType | None) -> bool:
    """Return whether an exception would break the running code."""
    if frame is not None and (frame.f_code.co_name in _SHORT or _package(frame) == "contextlib"):
        return True
    while frame is not None:
        if _package(frame) in _INDIVISIBLE or frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _unraisable(event: "UnraisableHookArgs") -> None:
    """Retry a KeyboardInterrupt that was raised where exceptions are lost, such as in a C callback."""
    if not issubclass(event.exc_type, KeyboardInterrupt):
        if _state.raised_at is None:  # otherwise the object may be half constructed because of the interrupt
            sys.__unraisablehook__(event)
        return
    _state.pending_since, _state.raised_at = time.monotonic(), None
    signal.setitimer(signal.ITIMER_REAL, _RETRY_S)
