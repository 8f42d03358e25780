"""Building blocks of a page for any terminal width: headings, facts, rows of figures."""

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.console import ConsoleRenderable, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from offspec.ui.cli.console import Console
from offspec.ui.cli.output import StdoutWriter
from offspec.ui.printable import printable

LABEL = 22  # columns of a label
_UNIT = 9
# Columns of a page. Wider pages separate labels from figures; narrower ones would split figures, so that
# wrapping is better left to the terminal.
_WIDEST, _NARROWEST = 110, 40
_LONGEST = 96  # columns of a line of prose
_LEAST_WHY = 20  # minimum columns for an explanation next to its figure
_GAP = "  "
_FIGURE = re.compile(r"(?<=\d) (?=(?:s|ms|min|h|[KMGT]?B|GB/s|tok/s|nodes|tokens|layers)\b)")


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Width of the terminal in columns, and whether it has only ASCII characters."""

    width: int
    ascii_only: bool = False

    @property
    def narrow(self) -> bool:
        """Whether explanations go below the figures because there is no room next to them."""
        return self.width < 64


def page(console: Console, sections: Callable[[PageLayout], Iterable[ConsoleRenderable]]) -> str:
    """Render sections as text for the width, colours and characters of this console."""
    console.width = min(max(console.width, _NARROWEST), _WIDEST)
    layout = PageLayout(console.width, ascii_only=console.options.ascii_only)
    with console.capture() as captured:
        console.print(Group(*sections(layout)))
    lines = (line.rstrip() for line in captured.get().split("\n"))
    return "\n".join(lines).strip("\n") + "\n"


def write_page(out: StdoutWriter, sections: Callable[[PageLayout], Iterable[ConsoleRenderable]]) -> None:
    """Write sections to stdout. Raises StdoutClosed, DiskFullError."""
    out.write_styled(page(Console(highlight=False), sections))


def plain(text: str, style: str = "") -> Text:
    """Make text without effective markup or control characters."""
    return Text(printable(text), style=style)


def heading(text: str) -> ConsoleRenderable:
    return Padding(plain(text, "bold"), (1, 0, 0, 0))


def indented(item: ConsoleRenderable) -> ConsoleRenderable:
    return Padding(item, (0, 0, 0, len(_GAP)))


def prose(texts: Iterable[str], layout: PageLayout, style: str = "dim") -> ConsoleRenderable:
    """Join sentences to a wrapped paragraph."""
    return indented(
        plain("\n".join(wrapped(" ".join(texts), min(layout.width, _LONGEST) - len(_GAP))), style)
    )


def columns(rights: Sequence[bool], layout: PageLayout) -> Table:
    """Make a table without lines. Columns of figures are right-aligned and never wrap."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for place, right in enumerate(rights):
        table.add_column(
            justify="right" if right else "left",
            no_wrap=right,
            overflow="fold",
            min_width=None if place or layout.narrow else LABEL,
        )
    return table


def listing(
    heads: Sequence[str], rights: Sequence[bool], rows: Iterable[Sequence[str]], layout: PageLayout
) -> Table:
    """Make a table with a header line. Each row begins with a name in bold."""
    table = columns(rights, layout)
    table.add_row(*(plain(head, "dim") for head in heads))
    for name, *figures in rows:
        table.add_row(plain(name, "bold"), *map(plain, figures))
    return table


def facts(rows: Sequence[tuple[str, str, str]], layout: PageLayout) -> ConsoleRenderable:
    """Lay out names, figures and reasons in three columns, or with reasons below if there is no room.

    The column of names is at least `LABEL` wide, and as wide as the longest name.
    A figure without a reason may be a long name; its further lines are indented.
    """
    figures = max((len(figure) for _, figure, why in rows if why), default=0)
    label_width = max([LABEL, *(len(name) for name, _, _ in rows)])
    left = len(_GAP) + label_width + len(_GAP) + figures + len(_GAP)
    below = layout.narrow or layout.width - left < _LEAST_WHY
    left = 2 * len(_GAP) if below else left
    lines = []
    for what, figure, why in rows:
        reasons = [plain(line, "dim") for line in wrapped(why, layout.width - left)]
        label = Text.assemble(_GAP, plain(what if below else f"{what:<{label_width}}"), _GAP)
        if not why:
            hanging = "\n" + " " * len(label)
            figure = hanging.join(wrapped(figure, layout.width - len(label)))
        fact = label.append_text(plain(figure, "bold"))
        if reasons and not below:
            fact.append(" " * (left - len(fact))).append_text(reasons.pop(0))
        lines += [fact, *(Text(" " * left).append_text(reason) for reason in reasons)]
    return Text("\n").join(lines)


def series(label: str, names: tuple[str, str], points: Sequence[tuple[int, str]], layout: PageLayout) -> Text:
    """Lay out points as two lines of figures: as many as fit, always with the first and the last."""
    cell = max(len(text) for at, figure in points for text in (f"{at:,}", figure)) + len(_GAP)
    first = _GAP + (f"{label}\n{_GAP * 2}" if layout.narrow else f"{label:<{LABEL}}{_GAP}")
    second = _GAP * 2 if layout.narrow else _GAP * 2 + " " * LABEL
    room = (layout.width - len(second) - _UNIT) // cell
    shown = _thinned(points, max(room, 2))
    above = f"{names[0]:<{_UNIT}}" + "".join(f"{at:>{cell},}" for at, _ in shown)
    below = f"{names[1]:<{_UNIT}}" + "".join(f"{figure:>{cell}}" for _, figure in shown)
    return Text.assemble(first, (above, "dim"), f"\n{second}", below)


def _thinned(points: Sequence[tuple[int, str]], most: int) -> list[tuple[int, str]]:
    """Pick at most `most` evenly spaced points, including both ends."""
    if len(points) <= most:
        return list(points)
    return [points[round(place * (len(points) - 1) / (most - 1))] for place in range(most)]


def wrapped(text: str, width: int) -> list[str]:
    """Wrap the text and keep each number on a line with its unit."""
    kept = _FIGURE.sub("\N{NO-BREAK SPACE}", text)
    lines = textwrap.wrap(kept, max(width, 1), break_on_hyphens=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]
