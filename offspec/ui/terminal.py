"""The terminal as it was before the program changed it, for ends that leave no time for more."""

import os
import sys
import termios
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

LINE = "\r\x1b[2K\x1b[?25h"  # erases a line that moves, and shows the cursor
SAVE_TITLE, RESTORE_TITLE = "\x1b[22;2t", "\x1b[23;2t"  # of the window, where the terminal keeps titles
# Ends bracketed paste, reports of size, mouse and focus, the keyboard's protocol, and the screen of its own.
SCREEN = (
    "\x1b[?2004l\x1b[?7h\x1b[?2048l\x1b[?1000l\x1b[?1003l\x1b[?1015l\x1b[?1006l\x1b[<u\x1b[?1049l\x1b[?25h"
    "\x1b[?1004l" + RESTORE_TITLE
)
_ERR = 2


@dataclass(slots=True)
class _Changes:
    """undo: what takes away what is drawn. settings: those from before, as termios has them."""

    undo: str = ""
    settings: Any = None


_changes = _Changes()


def changed(undo: str) -> None:
    """The terminal is drawn on from now on; what takes that away: LINE or SCREEN; nothing: no more."""
    if undo == SCREEN and _changes.settings is None:
        with suppress(termios.error):
            _changes.settings = termios.tcgetattr(_ERR)
    _changes.undo = undo


def give_back(text: str = "") -> None:
    """Undo what was changed, and write a text on stderr. Waits for nothing, and raises nothing."""
    with suppress(OSError, ValueError, termios.error):
        sys.stderr.flush()
    with suppress(OSError):
        os.set_blocking(_ERR, False)
        os.write(_ERR, (_changes.undo + text).encode())
        os.set_blocking(_ERR, True)
    if _changes.settings is not None:
        with suppress(termios.error):
            termios.tcsetattr(_ERR, termios.TCSANOW, _changes.settings)
