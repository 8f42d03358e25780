"""Where everything lies: a strip with one cell for each layer, and a table of parts by memory."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import ConsoleRenderable
from rich.text import Text

from offspec.ui.cli.tables import Look, columns, heading, indented, plain, prose
from offspec_planners.placement import Tier
from offspec_planners.plan.explain import explain_placement
from offspec_planners.units import format_bytes

if TYPE_CHECKING:
    from offspec_planners.plan import Plan

_CELLS = {Tier.DEVICE: ("█", "#"), Tier.HOST: ("▒", "+"), Tier.DISK: ("░", ".")}
_STYLES = {Tier.DEVICE: "green", Tier.HOST: "yellow", Tier.DISK: "blue"}


def placement_section(plan: "Plan", look: Look) -> Iterator[ConsoleRenderable]:
    """Heading, strip, legend, the table of parts, and why it is so."""
    yield heading("Where each layer goes")
    yield strip(plan.placement.tiers, look)
    yield legend(plan, look)
    yield _parts(plan, look)
    yield prose(explain_placement(plan), look)


def strip(tiers: tuple[Tier, ...], look: Look) -> Text:
    """The layers in order, with the number of the first in each line before it and of the last after."""
    digits = len(str(len(tiers) - 1))
    room = look.width - 2 * digits - 4
    cell = 2 if 2 * len(tiers) <= room else 1
    most = max(room // cell, 1)
    lines = []
    for first in range(0, len(tiers), most):
        shown = tiers[first : first + most]
        cells = [(_CELLS[tier][look.ascii_only] * cell, _STYLES[tier]) for tier in shown]
        numbers = (f"  {first:>{digits}} ", "dim"), (f" {first + len(shown) - 1}", "dim")
        lines.append(Text.assemble(numbers[0], *cells, numbers[1]))
    return Text("\n").join(lines)


def legend(plan: "Plan", look: Look) -> Text:
    """What the cells of the strip stand for, and how many layers each memory has."""
    entries = []
    for tier in Tier:
        count, head = len(plan.placement.layers(tier)), plan.placement.head is tier
        holds = [f"{count} {'layer' if count == 1 else 'layers'}"] if count else []
        holds += ["the head"] if head else []
        if holds:
            cell = (_CELLS[tier][look.ascii_only], _STYLES[tier])
            entries.append(Text.assemble(cell, f" {plan.memory_name(tier)}: {' and '.join(holds)}"))
    return Text("  ") + Text("\n  " if look.narrow else "   ").join(entries)


def _parts(plan: "Plan", look: Look) -> ConsoleRenderable:
    """What each memory holds, and how much of what it may; then what is left on disk."""
    table = columns((False, False, True), look)
    given = {"VRAM": plan.vram, "RAM": plan.memory, "disk": None}
    for where, most in given.items():
        parts = [part for part in plan.parts if plan.memory_name(part[1]) == where]
        for what, tier, size in parts:
            count = f"{len(plan.placement.layers(Tier(tier)))} " if what == "layers" else ""
            table.add_row(plain(count + what), where, format_bytes(size))
        if parts and most is not None:
            share = f"{format_bytes(sum(size for *_, size in parts))} of {format_bytes(most)}"
            table.add_row("in all", where, share, style="bold")
    return indented(table)
