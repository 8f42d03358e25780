"""Terminal UI of a chat, in Textual. It handles no tensors, and importing it does not import torch."""

import sys
from typing import TYPE_CHECKING

from offspec.ui import interrupt, terminal
from offspec.ui.printable import printable

if TYPE_CHECKING:
    from offspec.chat.archive import SessionArchive
    from offspec.ui.chat.setup import ChatSetup, Opener
    from offspec.ui.tui.app import ChatApp

_AT_ONCE = 0.5  # seconds to wait for the engine before showing a message
_AT_MOST = 10.0


def run(setup: "ChatSetup", opener: "Opener", archive: "SessionArchive | None" = None) -> int:
    """Chat until the user exits. Return the exit code. Raises OffspecError if the model cannot be loaded."""
    from offspec.ui.tui.app import ChatApp
    from offspec.ui.tui.terminal_decoder import install_terminal_decoder

    install_terminal_decoder()
    app = ChatApp(setup, opener, archive)
    terminal.set_restore_sequence(terminal.SCREEN)
    with interrupt.override_handler(app.interrupt):
        app.run()
    terminal.set_restore_sequence("")
    return leave(app)


def leave(app: "ChatApp") -> int:
    """Close the engine, print unsent input, and return the exit code. Raises the error that ended the app.

    A load cannot be cancelled, and a normal exit would wait for it, so the process then ends at once.
    """
    closed = app.engine is None or app.engine.close(_AT_ONCE)
    if not closed and not app.is_loading:
        print("closing the model ...", file=sys.stderr)
        closed = app.engine is None or app.engine.close(_AT_MOST)
    for text in (*(entry.text for entry in app.user_input.waiting), app.composer.text.strip()):
        if text:
            print(f"not sent: {printable(text)}", file=sys.stderr)
    if app.controller is not None and (line := app.controller.resume_command()):
        print(printable(line), file=sys.stderr)
    code = app.return_code or 0
    if not closed:
        interrupt.end_now(code)
    if app.failure is not None:
        raise app.failure
    return code
