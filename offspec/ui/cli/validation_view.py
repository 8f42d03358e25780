"""Table of predicted and measured speed for each prompt, with medians."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import ConsoleRenderable
from rich.table import Table

from offspec.ui.cli.tables import PageLayout, facts, heading, indented, plain
from offspec_planners.units import format_number, format_seconds

if TYPE_CHECKING:
    from offspec_planners.plan.forecast import Comparison, Validation, ValidationRow

_FIGURES = 29  # columns of one figure: predicted, measured, error
_PROMPT = (12, 32)  # minimum and maximum characters shown of a prompt


def validation_section(validation: "Validation", layout: PageLayout) -> Iterator[ConsoleRenderable]:
    """Yield heading and table, or two lines for each prompt on a narrow page."""
    yield heading("Predicted and measured")
    least, most = _PROMPT
    # Three figures if they fit, else two. The four columns are the margin and the gap after the prompt.
    count = 3 if layout.width - 4 - 3 * _FIGURES >= least else 2
    room = layout.width - 4 - count * _FIGURES
    shown = most if room < least else min(room, most)
    rows = [(_short(row.prompt, shown), row) for row in validation.rows]
    if room < least:
        yield _stacked([*rows, ("median", validation)], layout)
    else:
        yield _table(rows, validation, count)


def _table(
    rows: list[tuple[str, "ValidationRow"]], validation: "Validation", count: int
) -> ConsoleRenderable:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("\nprompt", no_wrap=True)
    for unit in ("s/pass", "tok/s", "tok/pass")[:count]:
        for header in (f"predicted\n{unit}", f"measured\n{unit}", "\nerror"):
            table.add_column(header, justify="right", no_wrap=True)
    for prompt, row in rows:
        table.add_row(plain(prompt), *_cells(row, count))
    table.add_row("median", *_cells(validation, count), style="bold")
    return indented(table)


def _cells(row: "ValidationRow | Validation", count: int) -> list[str]:
    figures = (row.seconds_per_pass, row.tok_per_s, row.tokens_per_pass)[:count]
    return [cell for figure in figures for cell in _figure(figure)]


def _figure(figure: "Comparison") -> tuple[str, str, str]:
    return format_number(figure.predicted), format_number(figure.measured), f"{figure.error:.1%}"


def _stacked(rows: "list[tuple[str, ValidationRow | Validation]]", layout: PageLayout) -> ConsoleRenderable:
    lines = []
    for name, row in rows:
        a_pass, speed = row.seconds_per_pass, row.tok_per_s
        lines += [
            (name, "", ""),
            (
                "a pass",
                format_seconds(a_pass.measured),
                _relative_error(a_pass, format_seconds(a_pass.predicted)),
            ),
            (
                "speed",
                f"{format_number(speed.measured)} tok/s",
                _relative_error(speed, format_number(speed.predicted)),
            ),
        ]
    return facts(lines, layout)


def _relative_error(figure: "Comparison", predicted: str) -> str:
    return f"predicted {predicted}, off by {figure.error:.1%}"


def _short(prompt: str, most: int) -> str:
    line = " ".join(prompt.split())
    return line if len(line) <= most else line[: most - 3] + "..."
