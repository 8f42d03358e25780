"""Markdown drawn as lines of a terminal: block by block, so that text added at the end costs its block alone.

Textual's own Markdown makes widgets of everything, some ten for a list of three. All of them are laid out
anew when the last grows, several times a second while an answer comes. Lines need no layout.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich import markdown as rich_markdown
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.syntax import Syntax
from rich.text import Text
from rich.theme import Theme

Line = list[Segment]

_CODE = {True: "monokai", False: "friendly"}  # by whether the theme is dark
_STYLES = {
    "markdown.h1": "bold underline",
    "markdown.h2": "bold underline",
    "markdown.h3": "bold",
    "markdown.h4": "bold italic",
    "markdown.h5": "italic",
    "markdown.h6": "italic",
    "markdown.code": "bold magenta",
    "markdown.block_quote": "italic",
    "markdown.link": "underline",
    "markdown.link_url": "dim",
    "markdown.table.border": "dim",
    "markdown.table.header": "bold",
    "markdown.item.bullet": "bold",
    "markdown.item.number": "bold",
    "markdown.hr": "dim",
}


class _Heading(rich_markdown.Heading):
    """At the left, whatever its level."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.text


class _Code(rich_markdown.CodeBlock):
    """Long lines go on below. A language that Pygments does not know is plain text, and is not guessed."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Syntax(
            str(self.text).rstrip(), self.lexer_name, theme=self.theme, word_wrap=True, padding=(0, 1)
        )


class _Blocks(rich_markdown.Markdown):
    """What was parsed already, ready to be drawn."""

    elements = {  # noqa: RUF012 - as Rich declares it
        **rich_markdown.Markdown.elements,
        "heading_open": _Heading,
        "fence": _Code,
        "code_block": _Code,
    }

    def __init__(self, tokens: list[Token], *, dark: bool) -> None:
        # Addresses are written out: what a link hides should be seen before it is followed.
        super().__init__("", code_theme=_CODE[dark], hyperlinks=False)
        self.parsed = tokens


@dataclass(slots=True)
class _Block:
    """One block of the outermost level, and its lines once they were drawn."""

    source: str
    tokens: list[Token]
    lines: dict[tuple[int, bool], list[Line]] = field(default_factory=dict)

    def drawn(self, width: int, dark: bool) -> list[Line]:
        if (width, dark) not in self.lines:
            self.lines = {(width, dark): _draw(self, width, dark)}
        return self.lines[width, dark]


class MarkdownLines:
    """Markdown that grows at its end. `read`: characters parsed so far, for tests."""

    def __init__(self) -> None:
        self.source = ""
        self.read = 0
        # HTML stays text: it would not be shown at all.
        self._parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
        self._blocks: list[_Block] = []

    def become(self, source: str) -> bool:
        """Show this; False, and nothing is done, where it does not go on from what is shown."""
        if not source.startswith(self.source):
            return False
        if len(source) > len(self.source):
            last = self._blocks.pop().source if self._blocks else ""
            self._blocks += self._parse(last + source[len(self.source) :])
            self.source = source
        return True

    def _parse(self, text: str) -> list[_Block]:
        self.read += len(text)
        rows, blocks, tokens = text.splitlines(keepends=True), list[_Block](), list[Token]()
        begun = 0  # the row at which the present block begins: what stands before the first is its own
        for token in self._parser.parse(text):
            starts = token.level == 0 and token.nesting >= 0 and token.map is not None
            if starts and tokens and token.map is not None:
                blocks.append(_Block("".join(rows[begun : token.map[0]]), tokens))
                begun, tokens = token.map[0], []
            tokens.append(token)
        return [*blocks, _Block("".join(rows[begun:]), tokens)]

    def lines(self, width: int, *, dark: bool) -> list[Line]:
        """All of it, `width` cells wide, with an empty line between two blocks."""
        every: list[Line] = []
        for block in self._blocks:
            drawn = block.drawn(width, dark)
            if drawn and every:
                every.append([])
            every += drawn
        return every


def _draw(block: _Block, width: int, dark: bool) -> list[Line]:
    if not block.tokens:
        return []
    console = _console(dark)
    options = console.options.update(width=max(width, 1), height=None)
    try:
        lines = console.render_lines(_Blocks(block.tokens, dark=dark), options, pad=False)
    except Exception:  # whatever a model wrote, it is shown: as it is, where it cannot be drawn
        lines = console.render_lines(Text(block.source.rstrip()), options, pad=False)
    return _trimmed(lines)


def _trimmed(lines: Sequence[Line]) -> list[Line]:
    """Without empty lines at either end, which some elements come with."""
    full = [index for index, line in enumerate(lines) if any(segment.text.strip() for segment in line)]
    return list(lines[full[0] : full[-1] + 1]) if full else []


@cache
def _console(dark: bool) -> Console:
    """One that writes nowhere and knows all colours: what the terminal can show is the app's business."""
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        no_color=False,
        legacy_windows=False,
        theme=Theme(_STYLES if dark else {**_STYLES, "markdown.code": "bold dark_magenta"}),
        _environ={},
    )
