"""How the peers bench is told: the ceiling before the runs, and a table for each temperature."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.lib.report import Report, ratio
from bench.peers.jobs import CONTENDERS, QUANTISED, TITLES, Scene
from bench.peers.tally import DECODING, FASTER
from offspec_planners.measure.disk import Bandwidth
from offspec_planners.units import format_bytes

NOTE = (
    "tokens per pass are those of a 135M pair: the widened target says what the small model says, and the "
    "draft, the same for offspec and for assisted generation, is that small model rounded to 4 bits; of "
    "llama.cpp's processes all that they read is counted, loading included"
)
_PEAKS = ("process_peak_bytes", "cgroup_anon_peak_bytes")
_SAME = {True: "yes", False: "no", None: "-"}


def ceiling_json(disk: Bandwidth, scene: Scene) -> dict[str, Any]:
    """One trip of the target's layers at the speed that its own files are read past the page cache."""
    layers, sizes = scene.recipe["layer_bytes"], scene.quantised_sizes
    found = {
        "raw_bytes_per_s": disk.bytes_per_s,
        "direct": disk.direct,
        "layer_bytes": layers,
        "head_bytes": scene.recipe["head_bytes"],
        "seconds_per_trip": ratio(layers, disk.bytes_per_s),
    }
    if sizes:
        trip = ratio(sizes["quantised_layer_bytes"], disk.bytes_per_s)
        found |= {**sizes, "quantised_seconds_per_trip": trip}
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
        table(row, f"{summary['model']} in {limit}, temperature {row['temperature']:g}", report)
    ceiling = summary["ceiling"]
    for row in summary["runs"]:
        at = f"T {row['temperature']:g}"
        for name, figures in row["contenders"].items():
            if "error" not in figures:
                trip = ceiling["quantised_seconds_per_trip" if name in QUANTISED else "seconds_per_trip"]
                bound = ratio(figures["tokens_per_pass"], trip)
                report.reached(
                    f"{at}: {_titled(name, figures['settings'])}: {figures['tokens_per_s']:.2f} tokens a s "
                    f"({figures['decode_tokens_per_s']:.2f} behind the prompt) of the {bound:.2f} that "
                    f"{figures['tokens_per_pass']:.2f} tokens a pass allow",
                    ratio(figures["tokens_per_s"], bound),
                )
        for name, figures in row["contenders"].items():
            tried = figures.get("settings_tried", {})
            if len(tried) > 1:
                told = (f"{setting} {one['tokens_per_s']:.2f}" for setting, one in tried.items())
                report.note(f"{at}: {TITLES[name]}, tokens a s: {'; '.join(told)}")
            for failed in figures.get("failures", ()):
                report.note(
                    f"{at}: {_titled(name, failed['settings'])}: {failed['kind']}: {failed['message']}"
                )
            if figures.get("same_tokens") is False:
                places = (f"{p} at token {place}" for p, place in figures["first_differences"].items())
                report.note(
                    f"{at}: {TITLES[name]} parts from offspec without speculation: {', '.join(places)}"
                )
    report.note(NOTE)


def table(row: Mapping[str, Any], title: str, report: Report) -> None:
    """One row for each contender; one that failed has its error in the place of figures."""
    heads = (
        "", "tok/s", "decoding", "first token, s", "tokens a pass", "read a token",
        "peak of the process", "of the cgroup, anon", "same tokens", "offspec is", "decodes",
    )  # fmt: skip
    found = {name: row["contenders"][name] for name in CONTENDERS if name in row["contenders"]}
    report.table(title, heads, [[TITLES[name], *_cells(figures)] for name, figures in found.items()])


def _cells(figures: Mapping[str, Any]) -> list[str]:
    if "error" in figures:
        return [f"did not run: {figures['error']['kind']}"]
    return [
        f"{figures['tokens_per_s']:.2f}",
        f"{figures['decode_tokens_per_s']:.2f}",
        f"{figures['ttft_s']:.1f}",
        f"{figures['tokens_per_pass']:.2f}",
        format_bytes(figures["read_bytes_per_token"]),
        *(format_bytes(figures[key]) if figures[key] else "-" for key in _PEAKS),
        _SAME[figures["same_tokens"]],
        *(f"{figures[key]:.2f}x" if figures.get(key) else "-" for key in (FASTER, DECODING)),
    ]


def _titled(name: str, settings: str) -> str:
    return f"{TITLES[name]} ({settings})" if settings else TITLES[name]
