"""The door for text that was not written here: what files, models and libraries say, made safe to show.

On a terminal control characters act, and those that turn the direction of text show it in another order
than it has. `printable` is for text; the console in `cli/console` and the line filter of the terminal UI are
behind all that is drawn; `guard_libraries` is for what writes on stderr by itself.
"""

import logging
import sys
import threading
import traceback
import warnings
from types import TracebackType

# C0 but for tab and newline, DEL, C1, and embeddings, overrides and isolates of bidirectional text.
_ACTING = [*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_CONTROLS = dict.fromkeys(_ACTING, "�")
_NOTHING = dict.fromkeys(_ACTING)


def printable(text: str) -> str:
    """The text with a sign in place of every character that a terminal would obey."""
    return text.translate(_CONTROLS)


def without_controls(text: str) -> str:
    """The text without these characters, which is as wide as before: they take no cell."""
    return text.translate(_NOTHING)


def guard_libraries() -> None:
    """From now on warnings, log records and tracebacks are printable, whatever they quote."""
    format_warning = warnings.formatwarning
    warnings.formatwarning = lambda *given, **more: printable(format_warning(*given, **more))
    logging.setLogRecordFactory(_PrintableRecord)
    sys.excepthook = _print_traceback
    threading.excepthook = lambda told: _print_traceback(told.exc_type, told.exc_value, told.exc_traceback)


class _PrintableRecord(logging.LogRecord):
    def getMessage(self) -> str:
        return printable(super().getMessage())


def _print_traceback(
    kind: type[BaseException], error: BaseException | None, where: TracebackType | None
) -> None:
    if sys.stderr is not None:
        sys.stderr.write(printable("".join(traceback.format_exception(kind, error, where))))
