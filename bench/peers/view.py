"""How the peers bench is told: the ceiling before the runs, a table for each temperature, and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from bench.lib.plots import save
from bench.lib.report import Report, grid, ratio
from bench.peers.jobs import CONTENDERS, TITLES
from bench.peers.quantised import QUANTISED, Quantised
from bench.peers.tally import DECODING, FASTER, GOALS, ours
from offspec.core.config import format_bytes
from offspec_planners.measure import Bandwidth

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOTE = (
    "tokens per pass are those of a 135M pair: the widened target says what the small model says, and the "
    "draft, the same for offspec and for assisted generation, is that small model rounded to 4 bits; of "
    "llama.cpp's processes all that they read is counted, loading included"
)
_SAME = {True: "yes", False: "no", None: "-"}


def ceiling_json(
    disk: Bandwidth, recipe: Mapping[str, Any], quantised: Quantised | None = None
) -> dict[str, Any]:
    """One trip of the target's layers at the speed that its own files are read past the page cache."""
    found = {
        "raw_bytes_per_s": disk.bytes_per_s,
        "direct": disk.direct,
        "layer_bytes": recipe["layer_bytes"],
        "head_bytes": recipe["head_bytes"],
        "seconds_per_trip": ratio(recipe["layer_bytes"], disk.bytes_per_s),
    }
    if quantised is not None:
        found |= quantised.to_json()
        found["quantised_seconds_per_trip"] = ratio(quantised.layer_bytes, disk.bytes_per_s)
    return found


def show_ceiling(ceiling: Mapping[str, Any], report: Report) -> None:
    how = "O_DIRECT" if ceiling["direct"] else "buffered: O_DIRECT was refused"
    report.ceiling(
        f"{ceiling['seconds_per_trip']:.2f} s a trip: {format_bytes(ceiling['layer_bytes'])} of layers at "
        f"{format_bytes(ceiling['raw_bytes_per_s'])}/s ({how}); what reads all of them has no more tokens "
        "a second than tokens a pass over that"
    )
    if "quantised_seconds_per_trip" in ceiling:
        report.ceiling(
            f"{ceiling['quantised_seconds_per_trip']:.2f} s a trip in 4 bits: "
            f"{format_bytes(ceiling['quantised_layer_bytes'])} of layers"
        )
    if "target_bytes" in ceiling:
        report.note(
            f"llama.cpp has {format_bytes(ceiling['target_bytes'])}, embedding and head in Q4_0 as well, and "
            f"a draft of {format_bytes(ceiling['draft_bytes'])}"
        )


def show(summary: Mapping[str, Any], report: Report) -> None:
    """A table for each temperature, one row for each contender, then what each reached of its ceiling."""
    limit = format_bytes(summary["memory_bytes"])
    for row in summary["runs"]:
        report.out.print(table(row, f"{summary['model']} in {limit}, temperature {row['temperature']:g}"))
    ceiling = summary["ceiling"]
    for row in summary["runs"]:
        for name, figures in _ran(row).items():
            trip = ceiling["quantised_seconds_per_trip" if name in QUANTISED else "seconds_per_trip"]
            bound = ratio(figures["tokens_per_pass"], trip)
            report.reached(
                f"T {row['temperature']:g}: {_titled(name, figures['settings'])}: "
                f"{figures['tokens_per_s']:.2f} tokens a s ({figures['decode_tokens_per_s']:.2f} behind the "
                f"prompt) of the {bound:.2f} that {figures['tokens_per_pass']:.2f} tokens a pass allow",
                ratio(figures["tokens_per_s"], bound),
            )
        for name, figures in row["contenders"].items():
            tried = figures.get("settings_tried", {})
            if len(tried) > 1:
                told = (f"{setting} {one['tokens_per_s']:.2f}" for setting, one in tried.items())
                report.note(f"T {row['temperature']:g}: {TITLES[name]}, tokens a s: {'; '.join(told)}")
            for failed in figures.get("failures", ()):
                report.note(
                    f"T {row['temperature']:g}: {_titled(name, failed['settings'])}: {_error(failed)}"
                )
            if figures.get("same_tokens") is False:
                report.note(
                    f"T {row['temperature']:g}: {TITLES[name]} parts from offspec without speculation: "
                    + ", ".join(f"{p} at token {at}" for p, at in figures["first_differences"].items())
                )
    report.note(NOTE)


def table(row: Mapping[str, Any], title: str) -> Table:
    """One row for each contender; one that failed has its error in the place of figures."""
    heads = (
        "tok/s", "decoding", "first token, s", "tokens a pass", "read a token",
        "peak of the process", "of the cgroup, anon", "same tokens", "offspec is", "decodes",
    )  # fmt: skip
    view = grid(title, "", *heads)
    for name in CONTENDERS:
        figures = row["contenders"].get(name)
        if figures is None:
            continue
        if "error" in figures:
            view.add_row(TITLES[name], f"did not run: {figures['error']['kind']}")
            continue
        anon, peak = figures["cgroup_anon_peak_bytes"], figures["process_peak_bytes"]
        faster, decodes = figures.get(FASTER), figures.get(DECODING)
        view.add_row(
            TITLES[name],
            f"{figures['tokens_per_s']:.2f}",
            f"{figures['decode_tokens_per_s']:.2f}",
            f"{figures['ttft_s']:.1f}",
            f"{figures['tokens_per_pass']:.2f}",
            format_bytes(figures["read_bytes_per_token"]),
            format_bytes(peak) if peak else "-",
            format_bytes(anon) if anon else "-",
            _SAME[figures["same_tokens"]],
            f"{faster:.2f}x" if faster else "-",
            f"{decodes:.2f}x" if decodes else "-",
        )
    return view


def _titled(name: str, settings: str) -> str:
    return f"{TITLES[name]} ({settings})" if settings else TITLES[name]


def _error(failed: Mapping[str, str]) -> str:
    return f"{failed['kind']}: {failed['message']}"


def _ran(row: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {name: figures for name, figures in row["contenders"].items() if "error" not in figures}


def plot(rows: Sequence[Mapping[str, Any]], model: str, out: Path) -> str:
    """Bars of tokens a second by contender, a panel for each temperature, with offspec's speed-up on each.
    Returns a line for the report."""

    def draw(axes: Sequence[Axes]) -> None:
        for axis, row in zip(axes, rows, strict=True):
            _bars(axis, row)
            axis.set(title=f"{model}, temperature {row['temperature']:g}", xlabel="tokens a second")

    return save(out, draw, columns=len(rows))


def _bars(axis: Axes, row: Mapping[str, Any]) -> None:
    names = [name for name in CONTENDERS if name in row["contenders"]][::-1]
    found = [row["contenders"][name] for name in names]
    speeds = [figures.get("tokens_per_s", 0.0) for figures in found]
    axis.barh(range(len(names)), speeds, 0.6)
    axis.set_yticks(range(len(names)), [TITLES[name] for name in names])
    axis.set_xlim(0, 1.35 * max([*speeds, 1e-9]))
    axis.grid(visible=False, axis="y")
    for place, (name, figures, speed) in enumerate(zip(names, found, speeds, strict=True)):
        if "error" in figures:
            told = f" did not run: {figures['error']['kind']}"
        else:
            faster = figures.get(DECODING if name in QUANTISED else FASTER)
            aim = f" (aim {GOALS[name]:g}×)" if name in GOALS else ""
            told = f" {speed:.2f}"
            told += f", offspec {faster:.1f}×{aim}" if faster and name != ours(name, names) else ""
        axis.text(speed, place, told, va="center", fontsize=7)
