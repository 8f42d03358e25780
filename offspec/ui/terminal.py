"""Restoring the terminal when the process ends abruptly."""

import os
import sys
import termios
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

LINE = "\r\x1b[2K\x1b[?25h"  # erases the live line and shows the cursor
SAVE_TITLE, RESTORE_TITLE = "\x1b[22;2t", "\x1b[23;2t"  # window title, if the terminal has a title stack
# Ends bracketed paste, reports of size, mouse and focus, the keyboard protocol, and the alternate screen.
SCREEN = (
    "\x1b[?2004l\x1b[?7h\x1b[?2048l\x1b[?1000l\x1b[?1003l\x1b[?1015l\x1b[?1006l\x1b[<u\x1b[?1049l\x1b[?25h"
    "\x1b[?1004l" + RESTORE_TITLE
)
_ERR = 2


@dataclass(slots=True)
class _TerminalState:
    """State to restore: escape sequence `undo`, and the previous termios `settings`."""

    undo: str = ""
    settings: Any = None


_state = _TerminalState()


def set_restore_sequence(undo: str) -> None:
    """Set the sequence that restores the terminal: LINE, SCREEN, or "" if nothing is drawn any more."""
    if undo == SCREEN and _state.settings is None:
        with suppress(termios.error):
            _state.settings = termios.tcgetattr(_ERR)
    _state.undo = undo


def restore_terminal(text: str = "") -> None:
    """Restore the terminal and write a text to stderr. Never blocks and never raises."""
    with suppress(OSError, ValueError, termios.error):
        sys.stderr.flush()
    with suppress(OSError):
        os.set_blocking(_ERR, False)
        os.write(_ERR, (_state.undo + text).encode())
        os.set_blocking(_ERR, True)
    if _state.settings is not None:
        with suppress(termios.error):
            termios.tcsetattr(_ERR, termios.TCSANOW, _state.settings)
