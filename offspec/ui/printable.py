"""Sanitizing of external text: output of files, models and libraries, made safe to display.

On a terminal, control characters take effect, and bidirectional ones display text in another order.
`printable` sanitizes text; the console in `cli/console` and the line filter of the terminal UI check
everything that is drawn; `sanitize_library_output` covers libraries that write to stderr themselves.
"""

import logging
import sys
import threading
import traceback
import warnings
from types import TracebackType

# C0 except tab and newline, DEL, C1, and embeddings, overrides and isolates of bidirectional text.
_ACTING = [*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_CONTROLS = dict.fromkeys(_ACTING, "�")
_NOTHING = dict.fromkeys(_ACTING)


def printable(text: str) -> str:
    """Replace every character that controls a terminal by a visible sign."""
    return text.translate(_CONTROLS)


def without_controls(text: str) -> str:
    """Remove control characters, which leaves the width unchanged: they take no cell."""
    return text.translate(_NOTHING)


def sanitize_library_output() -> None:
    """Make all later warnings, log records and tracebacks printable, whatever they quote."""
    format_warning = warnings.formatwarning
    warnings.formatwarning = lambda *given, **more: printable(format_warning(*given, **more))
    logging.setLogRecordFactory(_PrintableRecord)
    sys.excepthook = _print_traceback
    threading.excepthook = lambda args: _print_traceback(args.exc_type, args.exc_value, args.exc_traceback)


class _PrintableRecord(logging.LogRecord):
    def getMessage(self) -> str:
        return printable(super().getMessage())


def _print_traceback(
    kind: type[BaseException], error: BaseException | None, where: TracebackType | None
) -> None:
    if sys.stderr is not None:
        sys.stderr.write(printable("".join(traceback.format_exception(kind, error, where))))
