"""Plots of results, as SVG beside their JSON. matplotlib is loaded when one is drawn, and not needed else."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MISSING = "no plot: matplotlib is not installed; it comes with pip install -e '.[dev]'"
_SETTINGS: Any = {
    "svg.hashsalt": "offspec",  # the same figures give the same file
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
}


def save(out: Path, draw: Callable[[Sequence[Axes]], None], *, rows: int = 1, columns: int = 1) -> str:
    """Draw a grid of axes, handed over row by row, into an SVG file; returns a line for the report."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        return MISSING
    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=(4.6 * columns, 3.4 * rows), layout="constrained")
        draw(list(figure.subplots(rows, columns, squeeze=False).flat))
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, metadata={"Date": None})
    return f"plot in {out.parent.name}/{out.name}"


def stream_plot(groups: Mapping[str, Sequence[dict[str, Any]]], out: Path) -> str:
    """By tokens in a pass: its seconds over its floors, and shares of the ceiling. One row for each title.

    groups: title to rows as `stream_window.summarise` makes them.
    """

    def draw(axes: Sequence[Axes]) -> None:
        for place, (title, rows) in enumerate(groups.items()):
            seconds, shares = axes[2 * place : 2 * place + 2]
            _seconds(seconds, rows)
            _shares(shares, rows)
            seconds.set(title=title)
            for axis in (seconds, shares):
                axis.set(xlabel="tokens in a pass")
                axis.set_xticks(range(len(rows)), [str(row["tokens"]) for row in rows])
                axis.legend()

    return save(out, draw, rows=len(groups), columns=2)


def _seconds(axis: Axes, rows: Sequence[dict[str, Any]]) -> None:
    """Three bars for each number of tokens: the pass, the link alone, the processor alone."""
    bars = (("seconds", "a pass"), ("link_seconds", "link alone"), ("gemm_seconds", "GEMM alone"))
    for offset, (key, label) in enumerate(bars):
        at = [place + 0.27 * (offset - 1) for place in range(len(rows))]
        axis.bar(at, [row[key] for row in rows], 0.25, label=label)
    floor, attention = ([row[key] for row in rows] for key in ("gemm_seconds", "attention_seconds"))
    axis.bar(at, attention, 0.25, bottom=floor, label="attention alone")
    axis.set(ylabel="seconds a pass")


def _shares(axis: Axes, rows: Sequence[dict[str, Any]]) -> None:
    """Medians, with the least and the most as whiskers."""
    top = 1.1
    for key, label in (
        ("utilisation", "link in use"),
        ("of_bound", "of max(link, GEMM)"),
        ("of_bound_with_attention", "of max(link, GEMM + attention)"),
    ):
        middle = [row[key] for row in rows]
        least, most = ([row["spread"][key][end] for row in rows] for end in (0, 1))
        whiskers = [
            [value - low for value, low in zip(middle, least, strict=True)],
            [high - value for value, high in zip(middle, most, strict=True)],
        ]
        axis.errorbar(range(len(rows)), middle, yerr=whiskers, marker="o", capsize=2, label=label)
        top = max(top, *most)
    axis.axhline(0.95, linestyle=":", color="black", linewidth=0.8)
    axis.set(ylim=(0, top), ylabel="share of the ceiling")


def prefill_plot(rows: Sequence[dict[str, Any]], title: str, out: Path) -> str:
    """Seconds to the first token by length of the prompt, over one trip and over the compute floor."""

    def draw(axes: Sequence[Axes]) -> None:
        tokens = [row["tokens"] for row in rows]
        for key, label, style in (
            ("seconds", "to the first token", "o-"),
            ("trip_seconds", "one trip of the weights", "s--"),
            ("gemm_seconds", "GEMM", "^:"),
            ("compute_seconds", "GEMM and attention", "v-."),
        ):
            axes[0].plot(tokens, [row[key] for row in rows], style, label=label)
        axes[0].set(xlabel="tokens of the prompt", ylabel="seconds", title=title, ylim=(0, None))
        axes[0].set_xticks(tokens)
        axes[0].legend()

    return save(out, draw)


def calibration_plot(runs: Sequence[dict[str, Any]], titles: Mapping[str, str], out: Path) -> str:
    """Observed over expected acceptance by tenth, a line for each temperature, and tokens per pass.

    runs: as `calibration.summarise` makes them; titles: of the kinds of acceptance in them.
    """

    def draw(axes: Sequence[Axes]) -> None:
        for axis, (kind, title) in zip(axes, titles.items(), strict=False):
            axis.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle=":")
            for run in runs:
                rows = [row for row in run[kind] if row["nodes"]]
                points = ([row[key] for row in rows] for key in ("expected", "observed"))
                axis.plot(*points, "o-", label=f"T {run['temperature']:g}")
            axis.set(title=f"nodes, {title}", xlabel="expected", ylabel="observed", ylim=(0, 1))
            axis.legend()
        for offset, key in enumerate(("expected", "observed")):
            at = [place + 0.4 * (offset - 0.5) for place in range(len(runs))]
            axes[-1].bar(at, [run[key] for run in runs], 0.38, label=key)
        axes[-1].set(title="tokens a pass", ylabel="tokens")
        axes[-1].set_xticks(range(len(runs)), [f"T {run['temperature']:g}" for run in runs])
        axes[-1].legend()

    return save(out, draw, columns=len(titles) + 1)


def substitute_plot(rows: Sequence[dict[str, Any]], model: str, out: Path) -> str:
    """Tokens per pass by bytes of the draft's layers, a line for each temperature.

    rows: as `substitute.Row` has them; those of 16 bits are drawn apart, as the ceiling.
    """

    def draw(axes: Sequence[Axes]) -> None:
        axis = axes[0]
        for temperature in dict.fromkeys(row["temperature"] for row in rows):
            found = [row for row in rows if row["temperature"] == temperature]
            points = [(row["bytes"] / 1e6, row["pooled"]) for row in found if row["bits"] < 16]
            (line,) = axis.plot(*zip(*points, strict=True), "o-", label=f"T {temperature:g}")
            for row, point in zip((row for row in found if row["bits"] < 16), points, strict=True):
                axis.annotate(f"{row['bits']} bits", point, xytext=(4, -10), textcoords="offset points")
            for row in found:
                if row["bits"] == 16:
                    label = f"16 bits, {row['bytes'] / 1e6:.0f} MB"
                    axis.axhline(row["pooled"], color=line.get_color(), linestyle=":", label=label)
        axis.set(xlabel="MB of the draft's layers", ylabel="tokens a pass", title=model)
        axis.set(xlim=(0, None), ylim=(0, None))
        axis.legend()

    return save(out, draw)


def sources_plot(runs: Sequence[dict[str, Any]], out: Path) -> str:
    """Tokens per pass by source, for prompts that copy and for all others; a row for each temperature.

    runs: as `sources.summarise` makes them.
    """
    temperatures = list(dict.fromkeys(run["temperature"] for run in runs))

    def draw(axes: Sequence[Axes]) -> None:
        for axis, temperature in zip(axes, temperatures, strict=True):
            found = [run for run in runs if run["temperature"] == temperature]
            for offset, (name, color) in enumerate((("others", "tab:blue"), ("copy", "tab:orange"))):
                values = [run["others"] if name == "others" else run["kinds"].get(name) for run in found]
                at = [place + 0.4 * (offset - 0.5) for place in range(len(found))]
                heights = [value["pooled"] if value else 0.0 for value in values]
                axis.barh(at, heights, 0.38, label=f"{name} prompts", color=color)
            axis.set_yticks(range(len(found)), [run["choice"] for run in found])
            axis.invert_yaxis()
            axis.set(xlabel="tokens a pass", title=f"T {temperature:g}")
            axis.legend()

    return save(out, draw, rows=len(temperatures), columns=1)


def sweep_plot(cases: Sequence[dict[str, Any]], out: Path) -> str:
    """Tokens a second by budget and width, a map for each case, with the best pair and the plan's choice.

    cases: with `cells`, `best` and `chosen` as `sweep_tally.summarise` makes them, and the `plan`.
    """

    def draw(axes: Sequence[Axes]) -> None:
        for axis, case in zip(axes, cases, strict=True):
            _map(axis, case)

    return save(out, draw, columns=len(cases))


def _map(axis: Axes, case: dict[str, Any]) -> None:
    """Budgets from left to right, widths upwards, both by their logarithm."""
    budgets, widths = (sorted({cell[key] for cell in case["cells"]}) for key in ("budget", "width"))
    speed = {(cell["width"], cell["budget"]): cell["tok_per_s"] for cell in case["cells"]}
    most = max(speed.values())
    image = [[speed.get((width, budget), math.nan) for budget in budgets] for width in widths]
    axis.imshow(image, origin="lower", aspect="auto", vmin=0.0, vmax=most)
    for (width, budget), value in speed.items():
        colour = "black" if value > 0.7 * most else "white"
        axis.text(
            budgets.index(budget), widths.index(width) - 0.25, f"{value:.3g}", ha="center", color=colour
        )
    for figure, marker, label in ((case["best"], "o", "best pair"), (case["plan"], "*", "plan")):
        at = _between(figure["budget"], budgets), _between(figure["width"], widths)
        axis.plot(*at, marker, color="red", markerfacecolor="none", label=label)
    axis.set(title=f"{case['case']}: plan {case['of_best']:.2f} of best", xlabel="budget", ylabel="width")
    axis.set_xticks(range(len(budgets)), [str(budget) for budget in budgets])
    axis.set_yticks(range(len(widths)), [str(width) for width in widths])
    axis.grid(False)
    axis.legend()


def _between(value: float, ticks: Sequence[int]) -> float:
    """Where a value lies among ticks that are drawn at 0, 1, 2, …, by its logarithm."""
    for place, (low, high) in enumerate(pairwise(ticks)):
        if low <= value <= high:
            return place + math.log(value / low) / math.log(high / low)
    return 0.0 if value < ticks[0] else len(ticks) - 1.0
