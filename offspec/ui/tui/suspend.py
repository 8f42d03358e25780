"""Ctrl+Z: the shell gets the terminal until it continues the chat."""

import os
import signal
from typing import Any

from textual.app import App


def suspend(app: App[Any]) -> None:
    """Stop this job, and return when the shell continues it.

    Textual's own action sends SIGSTOP to this process alone. A parent in the same job, such as make, would
    then keep the terminal, and a chat without a shell, such as the only program of a container, could not
    be continued. SIGTSTP stops the whole job, and the kernel ignores it if no shell could continue that.

    Raises SuspendNotSupported where the app draws on no terminal.
    """
    with app.suspend():
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.killpg(0, signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)
