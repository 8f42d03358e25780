"""The first line: the model, who drafts for it, and what the conversation is called."""

from pathlib import PurePath
from typing import TYPE_CHECKING

from textual.content import Content
from textual.widgets import Static

if TYPE_CHECKING:
    from offspec.ui.chat.controller import Desk


class Header(Static):
    """Repaints only what changed."""

    def __init__(self, model: str) -> None:
        self._shown = _short(model)
        super().__init__(Content(self._shown), id="header", markup=False)

    def tell(self, desk: "Desk") -> None:
        engine, title = desk.engine, desk.session.conversation.title
        parts = (_short(engine.config.model), f"draft {_short(engine.draft)}", title)
        shown = " · ".join(part for part in parts if part)
        if shown != self._shown:
            self._shown = shown
            self.update(Content(shown), layout=False)


def _short(model: str) -> str:
    """The last part of a path; a hub id keeps its owner."""
    return PurePath(model).name if model.startswith(("/", ".", "~")) or model.count("/") > 1 else model
