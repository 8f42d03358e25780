"""What a model thought before it answered: folded to a line, and opened with a click or F2."""

from textual import events, on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from offspec.ui.chat.thinking import Part


class ThinkingBlock(Vertical):
    """The text is laid out only while it is open.

    Textual's Collapsible takes the keys away from the composer, scrolls where it is opened, and lays the
    whole screen out for each word that its title counts.
    """

    DEFAULT_CSS = """
    ThinkingBlock {
        height: auto;
    }
    ThinkingBlock > .title {
        height: 1;
        padding: 0 1;
        text-wrap: nowrap;
        text-overflow: ellipsis;
    }
    ThinkingBlock > .title:hover {
        color: $foreground;
    }
    ThinkingBlock > .thought {
        height: auto;
        padding: 0 0 0 3;
        display: none;
    }
    """

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part
        self._collapsed = True
        self._title = Static("", markup=False, classes="title")
        self._thought = Static("", markup=False, classes="thought")

    def compose(self) -> ComposeResult:
        yield self._title
        yield self._thought

    def on_mount(self) -> None:
        self._show()

    @property
    def title(self) -> str:
        """What the line says that is always there."""
        count = len(self.part.text.split())
        words = f"{count:,} {'word' if count == 1 else 'words'}"
        return f"thinking, {words}{'' if self.part.closed else ' …'}"

    @property
    def collapsed(self) -> bool:
        return self._collapsed

    @collapsed.setter
    def collapsed(self, collapsed: bool) -> None:
        self._collapsed = collapsed
        self._thought.display = not collapsed
        self._show()

    async def set_source(self, part: Part) -> bool:
        """Show the part as it is now."""
        if part != self.part:
            self.part = part
            self._show()
        return True

    @on(events.Click, ".title")
    def _toggle(self) -> None:
        self.collapsed = not self.collapsed

    def _show(self) -> None:
        self._title.update(Content(f"{'▸' if self._collapsed else '▾'} {self.title}"), layout=False)
        if not self._collapsed:
            self._thought.update(Content(self.part.text.strip()))
