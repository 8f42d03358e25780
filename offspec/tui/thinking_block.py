"""What a model thought before it answered: folded to a line, and opened with a click or F2."""

from textual import on
from textual.content import Content
from textual.widgets import Collapsible, Static

from offspec.chatting.thinking import Part


class ThinkingBlock(Collapsible):
    """The text is laid out only while it is open."""

    def __init__(self, part: Part) -> None:
        self._body = Static("", markup=False)
        super().__init__(self._body, title=_title(part), collapsed_symbol="▸", expanded_symbol="▾")
        self.part = part

    async def become(self, part: Part) -> bool:
        """Show the part as it is now."""
        self.part = part
        self.title = _title(part)
        self._fill()
        return True

    @on(Collapsible.Toggled)
    def _open(self) -> None:
        self._fill()

    def _fill(self) -> None:
        if not self.collapsed:
            self._body.update(Content(self.part.text.strip()))


def _title(part: Part) -> str:
    count = len(part.text.split())
    return f"thinking, {count:,} {'word' if count == 1 else 'words'}{'' if part.closed else ' …'}"
