"""The terminal outside of the screen of the chat: title of the window, bell, desktop notice, suspending.

A desktop notice is OSC 9, which began in iTerm2 and is the form that most terminals take: Ghostty, kitty,
WezTerm, foot, Warp. Others ignore it.
"""

import os
import signal
import time
from typing import Any

from textual.app import App

from offspec.ui.printable import printable
from offspec.ui.terminal import RESTORE_TITLE, SAVE_TITLE

_LONG = 10.0  # seconds of an answer after which its end is announced


class Notices:
    """Writes to the terminal of an app.

    Args:
        app: The chat.
        announce: Ring and notify when a long answer ends.
    """

    def __init__(self, app: App[Any], *, announce: bool) -> None:
        self._app, self._announce = app, announce
        self._title = ""
        self._began = 0.0

    def begin(self) -> None:
        """Keep the title that the window has, and give it back while the chat is suspended."""
        self._app.app_suspend_signal.subscribe(self._app, lambda _: self.end(), immediate=True)
        self._app.app_resume_signal.subscribe(
            self._app, lambda _: self._write(f"{SAVE_TITLE}\x1b]2;{self._title}\x07")
        )
        self._write(SAVE_TITLE)

    def end(self) -> None:
        """Give the window the title that it had."""
        self._write(RESTORE_TITLE)

    def title(self, conversation: str, *, answering: bool) -> None:
        """Show the conversation as the title of the window, with a mark while an answer comes."""
        title = f"{'⋯ ' * answering}{_line(conversation) or 'a new conversation'} · offspec"
        if title != self._title:
            self._title = title
            self._write(f"\x1b]2;{title}\x07")

    def answer_began(self) -> None:
        self._began = time.monotonic()

    def answer_ended(self, conversation: str, *, failed: bool) -> None:
        """Ring if the answer was long. Notify too if the user works in another window."""
        if not self._announce or time.monotonic() - self._began < _LONG:
            return
        self._app.bell()
        if not self._app.app_focus:
            said = "The answer was broken off by an error" if failed else "The answer is complete"
            self._write(f"\x1b]9;{said}: {_line(conversation)}\x07")

    def _write(self, codes: str) -> None:
        if self._app._driver is not None:  # as `App.bell` does; Textual has no public way
            self._app._driver.write(codes)


def _line(text: str) -> str:
    """The text on one line, without what would end a title or a notice."""
    return " ".join(printable(text).split())


def suspend(app: App[Any]) -> None:
    """Give the terminal to the shell: stop this job, and return when the shell continues it.

    Textual's own action sends SIGSTOP to this process alone. A parent in the same job, such as make, would
    then keep the terminal, and a chat without a shell, such as the only program of a container, could not
    be continued. SIGTSTP stops the whole job, and the kernel ignores it if no shell could continue that.

    Raises SuspendNotSupported where the app draws on no terminal.
    """
    with app.suspend():
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.killpg(0, signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)
