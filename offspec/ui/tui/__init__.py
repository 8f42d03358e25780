"""The terminal UI of a chat, in Textual. It knows no tensor, and importing it does not wait for torch."""

import sys
from typing import TYPE_CHECKING

from offspec.ui import interrupt, terminal
from offspec.ui.printable import printable

if TYPE_CHECKING:
    from offspec.chat.archive import Archive
    from offspec.ui.chat.setup import Opener, Setup
    from offspec.ui.tui.app import ChatApp

_AT_ONCE = 0.5  # seconds in which an engine closes without a word
_AT_MOST = 10.0


def run(setup: "Setup", opener: "Opener", archive: "Archive | None" = None) -> int:
    """Chat until the user leaves. The exit code; raises OffspecError where the model cannot be loaded."""
    from offspec.ui.tui.app import ChatApp
    from offspec.ui.tui.typed_text import keep_all_text

    keep_all_text()
    app = ChatApp(setup, opener, archive)
    terminal.changed(terminal.SCREEN)
    with interrupt.instead(app.interrupt):
        app.run()
    terminal.changed("")
    return leave(app)


def leave(app: "ChatApp") -> int:
    """Close what the app leaves behind; the exit code. Raises the error that ended it.

    A load cannot be broken off, and a process that ends under it would wait: it is left without ceremony.
    """
    closed = app.engine is None or app.engine.close(_AT_ONCE)
    if not closed and not app.is_loading:
        print("closing the model ...", file=sys.stderr)
        closed = app.engine is None or app.engine.close(_AT_MOST)
    for text in (*(entry.text for entry in app.user_input.waiting), app.composer.text.strip()):
        if text:
            print(f"not sent: {printable(text)}", file=sys.stderr)
    if app.controller is not None and (line := app.controller.resume_line()):
        print(printable(line), file=sys.stderr)
    code = app.return_code or 0
    if not closed:
        interrupt.end_now(code)
    if app.failure is not None:
        raise app.failure
    return code
