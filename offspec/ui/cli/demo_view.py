"""Live display of two answers: their texts, a progress bar, and the tree of the last pass."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from offspec.core.events import LoadProgress, PassProgress, PassStats, Result, TreeSeen
from offspec.ui import terminal
from offspec.ui.cli.console import Console
from offspec.ui.cli.output import StdoutWriter
from offspec.ui.printable import printable
from offspec.ui.tui.tree_drawing import SpanStyle, draw
from offspec_planners.units import format_bytes

_NARROWEST = 60  # columns of a terminal with room for two texts
_TREE_LINES = 12
_BAR = 16  # columns
_STYLES: dict[SpanStyle, str] = {
    "plain": "",
    "accepted": "green",
    "rejected": "dim",
    "probability": "dim",
    "branch": "dim",
    "bonus": "yellow",
}


@dataclass(frozen=True, slots=True)
class ProgressState:
    """Work in progress: a description, and the completed fraction (0 to 1)."""

    text: str
    done: float

    @classmethod
    def loading(cls, event: LoadProgress) -> Self:
        """Return the progress of loading."""
        done, total = f"{event.done}", f"{event.total} {event.unit}"
        if event.unit == "bytes":
            done, total = format_bytes(event.done), format_bytes(event.total)
        amount = f": {done} of {total}" if event.total else ""
        return cls(f"{event.stage}{amount}", event.done / max(1, event.total))

    @classmethod
    def in_pass(cls, event: PassProgress) -> Self:
        """Return the progress of a forward pass."""
        read = f", {format_bytes(event.bytes_streamed)} streamed" if event.bytes_streamed else ""
        tree = f" over {event.nodes} nodes" if event.nodes > 1 else ""
        where = f"layer {event.layer} of {event.layers}" if event.layer else "drafting"
        return cls(f"pass {event.index}{tree}: {where}{read}", event.layer / max(1, event.layers))


@dataclass
class Run:
    """One of the two answers so far.

    Args:
        title: Heading.
        text: Generated text.
        tokens: Number of generated tokens.
        began: Start of the request, in seconds of a monotonic clock.
        work: Work in progress.
        tree: Token tree of the last pass.
        passes: Statistics of each pass.
        result: Result, None until the answer is complete.
    """

    title: str
    text: str = ""
    tokens: int = 0
    began: float = 0.0
    work: ProgressState | None = None
    tree: TreeSeen | None = None
    passes: list[PassStats] = field(default_factory=list)
    result: Result | None = None

    @property
    def seconds(self) -> float:
        """Seconds since the request started."""
        return time.monotonic() - self.began

    @property
    def speed(self) -> float:
        """Tokens per second so far."""
        if self.result is not None:
            return self.result.tok_per_s
        return self.tokens / max(self.seconds, 1e-9) if self.tokens else 0.0


class ColumnView:
    """Both texts in columns, and below them progress bar and tree of the unfinished answer.

    As a context manager it restores the terminal.
    """

    def __init__(self, console: Console, runs: Sequence[Run]) -> None:
        self._runs = runs
        self._live = Live(
            console=console, get_renderable=self.drawn, refresh_per_second=12, vertical_overflow="crop"
        )

    def __enter__(self) -> Self:
        terminal.set_restore_sequence(terminal.LINE)
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        terminal.set_restore_sequence("")

    def changed(self, run: Run, text: str) -> None:
        """Do nothing, since the next refresh shows the text."""

    def note(self, text: str) -> None:
        self._live.console.print(Text(printable(text), style="dim"))

    def drawn(self) -> RenderableType:
        """Return the whole display."""
        table = Table.grid(padding=(0, 3, 0, 0), expand=True)
        for _ in self._runs:
            table.add_column(ratio=1)
        table.add_row(*map(_answer, self._runs))
        active = next((run for run in self._runs if run.result is None), None)
        return Group(Text(), table, *(() if active is None else _below(active)))


def _answer(run: Run) -> RenderableType:
    head = Text.assemble((run.title, "bold"), "  ", (f"{run.speed:.1f} tok/s" if run.tokens else "", "dim"))
    return Group(head, Text(printable(run.text)))


def _below(run: Run) -> list[RenderableType]:
    """Return the progress bar and the tree of the last pass."""
    found: list[RenderableType] = [Text()]
    if run.work is not None:
        line = Table.grid(padding=(0, 2, 0, 0))
        line.add_row(
            ProgressBar(1.0, run.work.done, width=_BAR),
            Text(printable(run.work.text), style="dim", no_wrap=True, overflow="ellipsis"),
        )
        found.append(line)
    if run.tree is not None:
        found += _tree(run.tree)
    return found


def _tree(tree: TreeSeen) -> list[Text]:
    drafts = len(tree.accepted) - 1
    lines = [Text(f"tree of pass {tree.index}: {len(tree.parent)} nodes, {drafts} accepted", style="dim")]
    for spans in draw(tree)[:_TREE_LINES]:
        line = Text(no_wrap=True, overflow="ellipsis")
        for span in spans:
            line.append(printable(span.text), _STYLES[span.style])
        lines.append(line)
    return lines


class LineView:
    """Display of one text after the other, for pipes and narrow terminals."""

    def __init__(self) -> None:
        self._out, self._shown = StdoutWriter(), ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._out.end_line()

    def changed(self, run: Run, text: str) -> None:
        if text and self._shown != run.title:
            self._out.end_line()
            self._out.write(f"{run.title}:\n")
            self._shown = run.title
        self._out.write(text)

    def note(self, text: str) -> None:
        self._out.end_line()
        typer.echo(printable(text), err=True)


View = ColumnView | LineView


def open_view(runs: Sequence[Run]) -> View:
    """Return columns on a terminal that is wide enough, else lines."""
    console = Console(highlight=False)
    moves = sys.stdout is not None and sys.stdout.isatty() and not console.is_dumb_terminal
    return ColumnView(console, runs) if moves and console.width >= _NARROWEST else LineView()
