"""Terminal features outside of the chat screen: window title, bell, desktop notifications, suspending.

Desktop notifications use OSC 9, which originated in iTerm2 and is the most widely supported form: Ghostty,
kitty, WezTerm, foot, Warp. Other terminals ignore it.
"""

import os
import signal
import time
from typing import Any

from textual.app import App

from offspec.ui.printable import printable
from offspec.ui.terminal import RESTORE_TITLE, SAVE_TITLE

_LONG = 10.0  # minimum seconds of an answer whose end is announced


class TerminalNotifier:
    """Window title and notifications on the terminal of an app.

    Args:
        app: The chat app.
        announce: Whether to ring and notify when a long answer ends.
    """

    def __init__(self, app: App[Any], *, announce: bool) -> None:
        self._app, self._announce = app, announce
        self._title = ""
        self._began = 0.0

    def begin(self) -> None:
        """Save the window title, and restore it while the chat is suspended."""
        self._app.app_suspend_signal.subscribe(self._app, lambda _: self.end(), immediate=True)
        self._app.app_resume_signal.subscribe(
            self._app, lambda _: self._write(f"{SAVE_TITLE}\x1b]2;{self._title}\x07")
        )
        self._write(SAVE_TITLE)

    def end(self) -> None:
        """Restore the window title."""
        self._write(RESTORE_TITLE)

    def set_title(self, conversation: str, *, answering: bool) -> None:
        """Set the window title to the conversation, with a mark during an answer."""
        title = f"{'⋯ ' * answering}{_line(conversation) or 'a new conversation'} · offspec"
        if title != self._title:
            self._title = title
            self._write(f"\x1b]2;{title}\x07")

    def answer_began(self) -> None:
        self._began = time.monotonic()

    def answer_ended(self, conversation: str, *, failed: bool) -> None:
        """Ring if the answer was long, and notify if another window has the focus."""
        if not self._announce or time.monotonic() - self._began < _LONG:
            return
        self._app.bell()
        if not self._app.app_focus:
            news = "The answer was ended by an error" if failed else "The answer is complete"
            self._write(f"\x1b]9;{news}: {_line(conversation)}\x07")

    def _write(self, codes: str) -> None:
        if self._app._driver is not None:  # as in `App.bell`; Textual has no public API for this
            self._app._driver.write(codes)


def _line(text: str) -> str:
    """Return the text on one line, without characters that would end a title or a notification."""
    return " ".join(printable(text).split())


def suspend(app: App[Any]) -> None:
    """Stop this job, so that the shell gets the terminal, and return when the shell continues it.

    Textual's own action sends SIGSTOP to this process alone. A parent in the same job, such as make, would
    then keep the terminal, and a chat without a shell, such as the only program of a container, could not
    be continued. SIGTSTP stops the whole job, and the kernel ignores it if no shell could continue the job.

    Raises SuspendNotSupported if the app does not draw on a terminal.
    """
    with app.suspend():
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.killpg(0, signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)
