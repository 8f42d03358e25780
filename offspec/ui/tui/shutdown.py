"""How the UI ends: the engine closed, the session saved, the terminal left as it was."""

import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

from offspec.ui.printable import printable

if TYPE_CHECKING:
    from offspec.ui.tui.app import ChatApp
    from offspec.ui.tui.worker import EngineThread

_AT_ONCE = 0.5  # seconds in which an engine closes without a word
_AT_MOST = 10.0
_HANGUP = 5.0  # seconds for saving when there is no terminal any more


def leave(app: "ChatApp") -> int:
    """Close what the app leaves behind; the exit code. Raises the error that ended it.

    A load cannot be broken off, and a process that ends under it would wait: it is left without ceremony.
    """
    closed = app.engine is None or app.engine.close(_AT_ONCE)
    if not closed and not app.is_loading:
        print("closing the model ...", file=sys.stderr)
        closed = app.engine is None or app.engine.close(_AT_MOST)
    for text in (*(entry.text for entry in app.asking.waiting), app.composer.text.strip()):
        if text:
            print(f"not sent: {printable(text)}", file=sys.stderr)
    code = app.return_code or 0
    if not closed:
        sys.stderr.flush()
        os._exit(code)
    if app.failure is not None:
        raise app.failure
    return code


def end_on_hangup(engine: "EngineThread") -> None:
    """When the terminal goes away, break off the answer, which saves it, and end.

    Nothing here waits for the screen: with the terminal gone, writing to it may never return.
    """

    def end() -> None:
        engine.close(_HANGUP)
        os._exit(128 + signal.SIGHUP)

    def hangup(signum: int, frame: object) -> None:
        threading.Thread(target=end, name="offspec-hangup", daemon=True).start()

    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup asked to be left alone
        signal.signal(signal.SIGHUP, hangup)
