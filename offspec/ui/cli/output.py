"""Standard output, guarded: what is written is flushed, and a reader that leaves is noticed."""

import errno
import os
import sys
from contextlib import suppress

from offspec.core.errors import DiskFullError, RequestError
from offspec.ui.printable import printable


class StdoutClosed(Exception):
    """Whoever read our standard output has gone (`offspec … | head -1`): stop, and say nothing."""


class Output:
    """Text to standard output as it comes.

    Raises RequestError where there is none, StdoutClosed when nobody reads any more, and DiskFullError when
    it is a file that cannot grow.
    """

    def __init__(self) -> None:
        if sys.stdout is None:
            raise RequestError("standard output is closed, so there is nowhere to write an answer to")
        self._stream = sys.stdout
        self.is_terminal = sys.stdout.isatty()
        self._at_line_start = True

    def write(self, text: str) -> None:
        """Write and flush at once, so that a pipe sees every token as it is decided."""
        self.write_styled(printable(text) if self.is_terminal else text)

    def write_styled(self, text: str) -> None:
        """Write text of our own making, in which control characters such as colours may act."""
        if not text:
            return
        encoding = self._stream.encoding or "utf-8"
        text = text.encode(encoding, errors="replace").decode(encoding)
        try:
            self._stream.write(text)
            self._stream.flush()
        except BrokenPipeError:
            raise StdoutClosed from None
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            abandon_stdout()
            raise DiskFullError("standard output is a file on a full disk; free some room there") from None
        self._at_line_start = text.endswith("\n")

    def end_line(self) -> None:
        """Start a new line, unless the text already did."""
        if not self._at_line_start:
            self.write("\n")


def abandon_stdout() -> None:
    """Let what is still buffered go nowhere: the interpreter flushes once more as it exits, and would
    print a complaint."""
    with suppress(OSError, ValueError):  # not a real file under a test
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
