"""Markdown that grows at its end."""

from markdown_it import MarkdownIt
from textual.widgets import Markdown

from offspec.chatting.thinking import Part


class Prose(Markdown):
    """Only the last block is read again when text is added."""

    def __init__(self, markdown: str | None = None) -> None:
        super().__init__(markdown, parser_factory=_parser)

    async def become(self, part: Part) -> bool:
        """Show the part as it is now; False where it does not go on from what is shown."""
        if not part.text.startswith(self.source):
            return False
        if len(part.text) > len(self.source):
            await self.append(part.text[len(self.source) :])
        return True


def _parser() -> MarkdownIt:
    """HTML stays text. As HTML it would not be shown at all."""
    return MarkdownIt("gfm-like", {"html": False})
