"""Streamed Markdown: one widget of lines, drawn block by block; new text redraws only the last block.

Textual's own Markdown makes a widget for every element, about ten for a list of three. All of them are laid
out again when the last one grows, several times a second during an answer. Lines need no layout: an answer of
2,000 tokens with lists and code takes 3.3 ms of CPU time per token at 30 writes per second, and 1.8 ms at 10
writes of 4 tokens; with `Markdown.get_stream` of Textual 8.2 it takes 9.8 and 6.5 ms.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from markdown_it.token import Token
from rich import markdown as rich_markdown
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.console import RenderResult as RichResult
from rich.segment import Segment
from rich.style import Style
from rich.syntax import Syntax
from rich.text import Text
from rich.theme import Theme
from textual.app import RenderResult
from textual.geometry import Region, Size
from textual.selection import Selection
from textual.strip import Strip
from textual.widget import Widget

from offspec.ui.markdown_parser import markdown_parser

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
    """Heading that is left-aligned at every level."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RichResult:
        yield self.text


class _Code(rich_markdown.CodeBlock):
    """Code block that wraps long lines. A language unknown to Pygments is plain text, without guessing."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RichResult:
        yield Syntax(
            str(self.text).rstrip(), self.lexer_name, theme=self.theme, word_wrap=True, padding=(0, 1)
        )


class _Blocks(rich_markdown.Markdown):
    """Markdown renderer of tokens that are already parsed."""

    elements = {  # noqa: RUF012 - as Rich declares it
        **rich_markdown.Markdown.elements,
        "heading_open": _Heading,
        "fence": _Code,
        "code_block": _Code,
    }

    def __init__(self, tokens: list[Token], *, dark: bool) -> None:
        # URLs are written out, so that users see the target of a link before they follow it.
        super().__init__("", code_theme=_CODE[dark], hyperlinks=False)
        self.parsed = tokens


@dataclass(slots=True)
class _Block:
    """Top-level block with its cached lines."""

    source: str
    tokens: list[Token]
    lines: dict[tuple[int, bool], list[Line]] = field(default_factory=dict)

    def drawn(self, width: int, dark: bool) -> list[Line]:
        if (width, dark) not in self.lines:
            self.lines = {(width, dark): _draw(self, width, dark)}
        return self.lines[width, dark]


def plain_text(markdown: str) -> str:
    """Return the text of Markdown without markup, one line per block."""
    tokens = markdown_parser().parse(markdown)
    return "\n".join(_plain(token) for token in tokens if token.type in ("inline", "fence", "code_block"))


def _plain(token: Token) -> str:
    if token.children is None:
        return token.content
    return "".join("\n" if child.type.endswith("break") else child.content for child in token.children)


class MarkdownLines:
    """Markdown that is appended to. `read`: number of characters parsed so far, for tests."""

    def __init__(self) -> None:
        self.source = ""
        self.read = 0
        self._parser = markdown_parser()
        self._blocks: list[_Block] = []

    def set_source(self, source: str) -> bool:
        """Set a source that extends the current one. Return False, without effect, if it does not."""
        if not source.startswith(self.source):
            return False
        if len(source) > len(self.source):
            last = self._blocks.pop().source if self._blocks else ""
            self._blocks += self._parse(last + source[len(self.source) :])
            self.source = source
        return True

    def _parse(self, text: str) -> list[_Block]:
        self.read += len(text)
        rows, blocks, tokens = re.findall(r"[^\n]*\n|[^\n]+", text), list[_Block](), list[Token]()
        begun = 0  # first row of the current block; rows before the first block belong to it
        for token in self._parser.parse(text):
            starts = token.level == 0 and token.nesting >= 0 and token.map is not None
            if starts and tokens and token.map is not None:
                blocks.append(_Block("".join(rows[begun : token.map[0]]), tokens))
                begun, tokens = token.map[0], []
            tokens.append(token)
        return [*blocks, _Block("".join(rows[begun:]), tokens)]

    def lines(self, width: int, *, dark: bool) -> list[Line]:
        """Return all lines, `width` cells wide, with an empty line between blocks."""
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
    except Exception:  # show the raw source of text that rich cannot draw
        lines = console.render_lines(Text(block.source.rstrip()), options, pad=False)
    return _trimmed(lines)


def _trimmed(lines: Sequence[Line]) -> list[Line]:
    """Remove empty lines at both ends, which some elements add."""
    full = [index for index, line in enumerate(lines) if any(segment.text.strip() for segment in line)]
    return list(lines[full[0] : full[-1] + 1]) if full else []


@cache
def _console(dark: bool) -> Console:
    """Return a console without output and with all colours; the app adapts them to the terminal."""
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        no_color=False,
        legacy_windows=False,
        theme=Theme(_STYLES if dark else {**_STYLES, "markdown.code": "bold dark_magenta"}),
        _environ={},
    )


class StreamedMarkdown(Widget, can_focus=False):
    """Markdown widget that repaints only changed lines, and is laid out only if their number changes."""

    DEFAULT_CSS = "StreamedMarkdown { height: auto; width: 1fr; }"

    def __init__(self, markdown: str = "") -> None:
        super().__init__()
        self._markdown = MarkdownLines()
        self._markdown.set_source(markdown)
        self._lines: list[Line] = []
        self._drawn: tuple[int, bool] | None = None  # width and theme of `_lines`

    @property
    def source(self) -> str:
        return self._markdown.source

    def set_source(self, markdown: str) -> bool:
        """Show a text that extends the current one. Return False if it does not."""
        if markdown == self.source:
            return True
        if not self._markdown.set_source(markdown):
            return False
        before, self._drawn = self._lines, None
        width = self.content_size.width
        if not width:
            self.refresh(layout=True)
            return True
        now = self._lines_at(width)
        if len(now) != len(before):
            self.refresh(layout=True)
        else:
            changed = next((y for y, line in enumerate(now) if line != before[y]), len(now))
            self.refresh(Region(0, changed, width, len(now) - changed))
        return True

    def _lines_at(self, width: int) -> list[Line]:
        look = width, self.app.current_theme.dark
        if self._drawn != look:
            self._lines, self._drawn = self._markdown.lines(width, dark=look[1]), look
        return self._lines

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._lines_at(width))

    def notify_style_update(self) -> None:
        """Redraw if the theme changed, since code has different colours in each."""
        if self._drawn is not None and self._drawn[1] != self.app.current_theme.dark:
            self.refresh(layout=True)
        super().notify_style_update()

    def render(self) -> RenderResult:
        return ""  # `render_line` renders

    def render_line(self, y: int) -> Strip:
        width, plain = self.content_size.width, self.rich_style
        lines = self._lines_at(width) if width else []
        if y >= len(lines):
            return Strip.blank(width, plain)
        strip = Strip(lines[y]).apply_style(plain)
        selection = self.text_selection
        span = selection.get_span(y) if selection is not None else None
        if span is not None:
            strip = _highlighted(strip, span, self)
        return strip.adjust_cell_length(width, plain).apply_offsets(0, y)

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """Return the selected text of the displayed lines."""
        shown = ("".join(segment.text for segment in line).rstrip() for line in self._lines)
        return selection.extract("\n".join(shown)), "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        self.refresh()


def _highlighted(strip: Strip, span: tuple[int, int], widget: Widget) -> Strip:
    """Return the strip with the characters from span[0] to span[1] (-1: its end) shown as selected."""
    text = strip.text
    start, end = (cell_len(text[:at]) if at >= 0 else strip.cell_length for at in span)
    selected = widget.screen.get_component_rich_style("screen--selection")
    # Colours of code are meant for another background.
    style = Style(color=widget.rich_style.color, bgcolor=selected.bgcolor, reverse=selected.reverse)
    before, inside, after = strip.divide([start, end, max(end, strip.cell_length)])
    shown = Strip(Segment.apply_style(inside, post_style=style), inside.cell_length)
    return Strip.join([before, shown, after])
