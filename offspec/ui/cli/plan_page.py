"""The page of a plan: machine, placement, tree, predicted speed, and possible improvements."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import ConsoleRenderable
from rich.text import Text

from offspec.ui.cli.console import Console
from offspec.ui.cli.hardware import machine_section
from offspec.ui.cli.plot import plot
from offspec.ui.cli.tables import PageLayout, columns, facts, heading, indented, page, plain, prose, series
from offspec.ui.cli.validation_view import validation_section
from offspec.ui.messages import with_options
from offspec_planners.placement import Tier
from offspec_planners.plan.explain import (
    explain_bound,
    explain_first_token,
    explain_placement,
    explain_rate,
    explain_shared,
    explain_tree,
)
from offspec_planners.plan.forecast import best_by_budget
from offspec_planners.units import format_bytes, format_count, format_number, format_seconds

if TYPE_CHECKING:
    from offspec_planners.plan import Part, Plan
    from offspec_planners.plan.forecast import Validation

_CELLS = {Tier.DEVICE: ("█", "#"), Tier.CPU: ("▓", "%"), Tier.HOST: ("▒", "+"), Tier.DISK: ("░", ".")}
_STYLES = {Tier.DEVICE: "green", Tier.CPU: "magenta", Tier.HOST: "yellow", Tier.DISK: "blue"}
_CURVE = 90  # maximum columns of a curve; wider ones only get flatter
_SHARED = 72  # columns that a table of sequences needs
_DRAFT_MODES = {
    "full": "in its stored precision",
    "expanded": "{bits}-bit values stored in 16 bits, which is faster here",
    "packed": "quantized to {bits} bits",
    "head": "reads hidden states of the target",
}
_TREES = {
    "dynamic": "grown best-first in every pass",
    "sequoia": "one fixed, optimized shape for all passes",
}


def render(console: Console, plan: "Plan", validation: "Validation | None" = None) -> str:
    """Render the page as text for this console."""
    return page(console, lambda layout: _sections(plan, validation, layout))


def _sections(
    plan: "Plan", validation: "Validation | None", layout: PageLayout
) -> Iterator[ConsoleRenderable]:
    yield from _title(plan)
    yield from machine_section(plan.hardware, layout)
    yield from _costs(plan, layout)
    yield from _placement(plan, layout)
    yield from _tree(plan, layout)
    yield from _forecast(plan, layout)
    yield from _curve(plan, layout)
    yield from _shared(plan, layout)
    yield from _what_ifs(plan, layout)
    if plan.notes:
        yield heading("Notes")
        yield from (prose([with_options(note)], layout, "") for note in plan.notes)
    if validation is not None:
        yield from validation_section(validation, layout)


def _title(plan: "Plan") -> Iterator[ConsoleRenderable]:
    yield Text.assemble(plain(plan.target, "bold"), ": ", (f"about {explain_rate(plan)}", "bold green"))
    sizes = [] if plan.vram is None else [format_bytes(size) for size in (plan.vram, *plan.more_vram)]
    vram = f" and {' + '.join(sizes)} of VRAM" if sizes else ""
    narrow = f", weights in {plan.quantize}" if plan.quantize else ""
    narrow += ", int8 KV cache" if plan.kv_cache == "int8" else ""
    yield plain(
        f"in {format_bytes(plan.memory)} of RAM{vram}, {plan.dtype} on {plan.device}{narrow}, "
        f"context {plan.context:,}, temperature {plan.temperature:g}"
    )


def _costs(plan: "Plan", layout: PageLayout) -> Iterator[ConsoleRenderable]:
    """Yield the compute time of passes by rows, and of draft steps by width."""
    passes = [(rows, format_number(seconds)) for rows, seconds in plan.costs.compute]
    yield series("computing a pass", ("nodes", "seconds"), passes, layout)
    if plan.draft_mode != "none":
        steps = [(width, format_number(seconds * 1e3)) for width, seconds in plan.costs.step]
        yield series("a draft step", ("width", "ms"), steps, layout)


def _placement(plan: "Plan", layout: PageLayout) -> Iterator[ConsoleRenderable]:
    """Yield heading, strip, legend, table of parts, and the reasons."""
    yield heading("Placement of the layers")
    yield _strip(plan.placement.tiers, layout)
    yield _legend(plan, layout)
    yield _parts(plan, layout)
    yield prose(explain_placement(plan), layout)


def _strip(tiers: tuple[Tier, ...], layout: PageLayout) -> Text:
    """Draw the layers in order; each line has the numbers of its first and last layer at its ends."""
    digits = len(str(len(tiers) - 1))
    room = layout.width - 2 * digits - 4
    cell = 2 if 2 * len(tiers) <= room else 1
    most = max(room // cell, 1)
    lines = []
    for first in range(0, len(tiers), most):
        shown = tiers[first : first + most]
        cells = [(_CELLS[tier][layout.ascii_only] * cell, _STYLES[tier]) for tier in shown]
        numbers = (f"  {first:>{digits}} ", "dim"), (f" {first + len(shown) - 1}", "dim")
        lines.append(Text.assemble(numbers[0], *cells, numbers[1]))
    return Text("\n").join(lines)


def _legend(plan: "Plan", layout: PageLayout) -> Text:
    """Explain the cells of the strip, with the number of layers in each memory."""
    entries = []
    for tier in Tier:
        count, head = len(plan.placement.layers(tier)), plan.placement.head is tier
        holds = [format_count(count, "layer")] if count else []
        holds += ["the head"] if head else []
        if holds:
            name = plan.memory_name(tier) + (", computed by the CPU" if tier is Tier.CPU else "")
            cell = (_CELLS[tier][layout.ascii_only], _STYLES[tier])
            entries.append(Text.assemble(cell, f" {name}: {' and '.join(holds)}"))
    return Text("  ") + Text("\n  " if layout.narrow else "   ").join(entries)


def _parts(plan: "Plan", layout: PageLayout) -> ConsoleRenderable:
    """Return a table of the parts in each memory with totals and limits, and the parts on disk."""
    table = columns((False, False, True), layout)
    given = [("VRAM", 0, plan.vram), *(("VRAM", gpu, most) for gpu, most in enumerate(plan.more_vram, 1))]
    for memory, gpu, most in (*given, ("RAM", 0, plan.memory), ("disk", 0, None)):
        parts = [part for part in plan.parts if (plan.memory_name(part.tier), part.gpu) == (memory, gpu)]
        where = f"{memory} of GPU {gpu}" if plan.more_vram and memory == "VRAM" else memory
        for part in parts:
            count = f"{_layers_of(plan, part)} " if part.what == "layers" else ""
            what = count + part.what + (" on the CPU" if part.tier == Tier.CPU else "")
            table.add_row(plain(what), where, format_bytes(part.bytes))
        if parts and most is not None:
            share = f"{format_bytes(sum(part.bytes for part in parts))} of {format_bytes(most)}"
            table.add_row("total", where, share, style="bold")
    return indented(table)


def _layers_of(plan: "Plan", part: "Part") -> int:
    tiers = plan.placement.tiers_on(part.gpu) if part.tier == Tier.DEVICE else plan.placement.tiers
    return sum(tier == part.tier for tier in tiers)


def _tree(plan: "Plan", layout: PageLayout) -> Iterator[ConsoleRenderable]:
    yield heading("Draft and tree")
    if plan.draft_mode != "none":
        rows = [
            ("draft", plan.draft, _DRAFT_MODES[plan.draft_mode].format(bits=plan.draft_bits)),
            ("budget", format_count(plan.budget, "node"), "maximum tree size per pass"),
            ("width", format_count(plan.width, "node"), "expanded per draft step"),
            ("depth", format_count(plan.depth, "level"), "average depth of a tree"),
            ("tree", plan.tree, _TREES[plan.tree]),
        ]
        yield facts(rows, layout)
    yield prose(explain_tree(plan), layout)


def _forecast(plan: "Plan", layout: PageLayout) -> Iterator[ConsoleRenderable]:
    forecast = plan.forecast
    yield heading("Expected speed, and its bottleneck")
    alone = format_number(plan.tok_per_s_alone)
    rows = [
        (
            "first token",
            format_seconds(forecast.ttft_s),
            f"for a prompt of {forecast.prompt_tokens:,}; {explain_first_token(plan)}",
        ),
        ("a pass", format_seconds(forecast.seconds_per_pass), explain_bound(plan)),
        ("tokens per pass", format_number(forecast.tokens_per_pass), plan.acceptance),
        ("speed", f"{format_number(forecast.tok_per_s)} tok/s", f"at one token per pass: {alone} tok/s"),
    ]
    if plan.sequences > 1:
        each = format_number(forecast.tok_per_s / plan.sequences)
        note = f"{each} for each of {plan.sequences} sequences; at one token of each per pass: {alone} tok/s"
        rows[-1] = ("total speed", rows[-1][1], note)
    yield facts(rows, layout)


def _curve(plan: "Plan", layout: PageLayout) -> Iterator[ConsoleRenderable]:
    """Yield a curve of speed by budget, each with its best width."""
    best = best_by_budget(plan.sweep)
    if len(best) < 2:
        return
    points = [(choice.budget, choice.tok_per_s) for choice in best]
    mark = plan.budget, plan.forecast.tok_per_s
    lines = _plotted(points, mark, "budget in nodes", layout)
    if lines is not None:
        yield heading("Speed by tree size (--budget), each with its best width")
        yield lines


def _plotted(
    points: list[tuple[int, float]], mark: tuple[int, float], x_label: str, layout: PageLayout
) -> ConsoleRenderable | None:
    """Plot tokens per second against another quantity, marking this plan; None if there is no room."""
    lines = plot(
        points,
        width=min(layout.width, _CURVE) - 2,
        mark=mark,
        x_label=x_label,
        y_label="tok/s",
        ascii_only=layout.ascii_only,
    )
    return indented(Text("\n".join(lines), style="cyan")) if lines else None


def _shared(plan: "Plan", layout: PageLayout) -> Iterator[ConsoleRenderable]:
    """Yield speeds for other numbers of sequences: a table, a curve, and an explanation."""
    if not plan.shared:
        return
    yield heading("Concurrent sequences, each number with its best budget")
    rows = [
        (
            format_count(row.sequences, "sequence"),
            format_number(row.tok_per_s),
            format_number(row.each),
            f"{row.budget:,}",
            format_seconds(row.seconds_per_pass),
            format_seconds(row.link_seconds),
            format_bytes(row.caches),
        )
        for row in plan.shared
    ]
    names = ("", "tok/s", "each", "nodes", "a pass", "link", "KV caches")
    if layout.width < _SHARED:
        yield facts(
            [
                (count, f"{speed} tok/s", ", ".join(map(" ".join, zip(names[2:], others, strict=True))))
                for count, speed, *others in rows
            ],
            layout,
        )
    else:
        table = columns((False, *[True] * (len(names) - 1)), layout)
        table.add_row(*names, style="dim")
        for row, figures in zip(plan.shared, rows, strict=True):
            table.add_row(*figures, style="bold" if row.sequences == plan.sequences else None)
        yield indented(table)
    points = [(row.sequences, row.tok_per_s) for row in plan.shared]
    mark = plan.sequences, plan.forecast.tok_per_s
    lines = _plotted(points, mark, "sequences", layout) if len(points) > 1 else None
    if lines is not None:
        yield lines
    yield prose(explain_shared(plan), layout)


def _what_ifs(plan: "Plan", layout: PageLayout) -> Iterator[ConsoleRenderable]:
    """Yield changes that raise the speed, the largest gain first."""
    here = plan.forecast.tok_per_s
    gains = [(speed, row) for row in plan.what_ifs if (speed := row.tok_per_s or 0.0) > here]
    if not gains:
        return
    yield heading("Possible improvements")
    rows = [
        (row.change, f"{format_number(speed)} tok/s", f"x {format_number(speed / here, 2)}", row.note)
        for speed, row in sorted(gains, key=lambda gain: gain[0], reverse=True)
    ]
    if layout.narrow:
        yield facts([(change, f"{figure} {times}", note) for change, figure, times, note in rows], layout)
        return
    table = columns((False, True, True, False), layout)
    for change, figure, times, note in rows:
        table.add_row(plain(change), plain(figure, "bold"), times, plain(note, "dim"))
    yield indented(table)
