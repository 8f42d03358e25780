"""The terminal UI of a chat, in Textual. It knows no tensor, and importing it does not wait for torch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offspec.chat.archive import Archive
    from offspec.ui.chat.setup import Opener, Setup
    from offspec.ui.tui.app import ChatApp

__all__ = ["ChatApp", "run"]


def run(setup: "Setup", opener: "Opener", archive: "Archive | None" = None) -> int:
    """Chat until the user leaves. The exit code; raises OffspecError where the model cannot be loaded."""
    from offspec.ui.tui.app import ChatApp
    from offspec.ui.tui.shutdown import leave

    app = ChatApp(setup, opener, archive)
    app.run()
    return leave(app)


def __getattr__(name: str) -> Any:
    if name == "ChatApp":
        from offspec.ui.tui.app import ChatApp

        return ChatApp
    raise AttributeError(f"module 'offspec.ui.tui' has no attribute {name!r}")
