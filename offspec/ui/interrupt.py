"""Ctrl-C, from the first strike to the end of the process.

Python raises KeyboardInterrupt between any two instructions. Some code cannot bear that: a module that is
half imported stays so, rich loses count of what it draws, and what `__del__` raises is only printed. There a
strike waits for a better moment. Where none comes soon, or where the user strikes again because the command
takes too long to end, the process ends at once: unfinished files are removed and the terminal is given back.
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

from offspec.core.files import remove_unfinished
from offspec.ui import terminal

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

CODE = 128 + signal.SIGINT  # as a shell has it

_RETRY_S = 0.02
_PATIENCE_S = 0.5  # that a strike waits for its moment
_ONE_HAND_S = 1.0  # a strike this soon after another says nothing new
# Packages whose state half a call would break.
_INDIVISIBLE = {"importlib", "rich", "textual", "weakref", "_weakrefset"}
_SHORT = {"__enter__", "__exit__", "__del__"}  # functions between an action and what takes it back


@dataclass(slots=True)
class _State:
    """What has happened.

    Args:
        active: a command runs.
        struck: when the strike came that waits; None: none does.
        raised: when a strike became a KeyboardInterrupt; None: none did.
        said: the user was told that the command was stopped.
        instead: what a strike calls, where it does not end the command.
    """

    active: bool = False
    struck: float | None = None
    raised: float | None = None
    said: bool = False
    instead: Callable[[], object] | None = None


_state = _State()


def listen() -> None:
    """Take Ctrl-C over, unless it is ignored, as behind nohup. Outside of `command` it ends the process.

    The signals that end a process remove its unfinished files first.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGALRM, _strike)
        signal.signal(signal.SIGINT, _strike)
        sys.unraisablehook = _unraisable
    for signum in (signal.SIGTERM, signal.SIGHUP):  # a terminal that is closed sends the second
        if signal.getsignal(signum) is signal.SIG_DFL:
            signal.signal(signum, _end)


@contextmanager
def command() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt in the block, once."""
    _state.active = True
    try:
        yield
    finally:
        _state.active = False


@contextmanager
def instead(do: Callable[[], object]) -> Iterator[None]:
    """In the block a strike calls `do`, and only the next one raises KeyboardInterrupt.

    Does so where nobody listens as well.
    """
    before, handler = _state.instead, signal.getsignal(signal.SIGINT)
    _state.instead = do
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda signum, frame: _act())
    try:
        yield
    finally:
        _state.instead = before
        if handler is signal.default_int_handler:
            signal.signal(signal.SIGINT, handler)


def interrupted() -> KeyboardInterrupt:
    """What to raise for a strike that was put off by `instead`."""
    ending()
    return KeyboardInterrupt()


def ending() -> None:
    """A strike ends the command now, as if KeyboardInterrupt had been raised."""
    _state.raised = time.monotonic()


def was_said() -> None:
    """The user was told that the command was stopped."""
    _state.said = True


def leave() -> None:
    """End the process now, after Ctrl-C."""
    end_now(CODE, "" if _state.said or not _state.active else "stopped\n")


def end_now(code: int, text: str = "") -> NoReturn:
    """End the process without unfinished files, and with the terminal as it was.

    Args:
        code: Exit code.
        text: Written to stderr.
    """
    _clean_up(text)
    os._exit(code)


def _clean_up(text: str = "") -> None:
    remove_unfinished()  # first: with the terminal gone, writing to it may never return
    terminal.give_back(text)


def _strike(signum: int, frame: FrameType | None) -> None:
    """The handler, in the main thread: of Ctrl-C, and of the alarm that calls for a strike that waits."""
    now = time.monotonic()
    if signum == signal.SIGALRM and _state.struck is None:
        return
    if not _state.active or (_state.raised is not None and now - _state.raised > _ONE_HAND_S):
        leave()
    if _state.raised is not None:
        return
    _state.struck = _state.struck or now
    if _state.instead is not None or not _is_indivisible(frame):
        _act()
    elif now - _state.struck > _PATIENCE_S:
        leave()
    else:
        signal.setitimer(signal.ITIMER_REAL, _RETRY_S)


def _end(signum: int, frame: FrameType | None) -> None:
    """End as the signal would, without unfinished files."""
    _clean_up()
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


def _act() -> None:
    _state.struck = None
    if (do := _state.instead) is not None:
        _state.instead = None
        do()
        return
    raise interrupted()


def _is_indivisible(frame: FrameType | None) -> bool:
    """Whether what runs would be broken by an exception from nowhere."""
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
    """Try again where a KeyboardInterrupt was raised in what cannot raise, such as a callback of C."""
    if not issubclass(event.exc_type, KeyboardInterrupt):
        if _state.raised is None:  # else it may be of an object whose making the strike broke off
            sys.__unraisablehook__(event)
        return
    _state.struck, _state.raised = time.monotonic(), None
    signal.setitimer(signal.ITIMER_REAL, _RETRY_S)
