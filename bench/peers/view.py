"""Output of the peers bench: the ceiling before the runs, and a table for each temperature."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.lib.report import Report, ratio
from bench.peers.jobs import CONTENDERS, QUANTIZED, TITLES, BenchSetup
from bench.peers.summary import DECODING, FASTER
from offspec_planners.measure.disk import Bandwidth
from offspec_planners.units import format_bytes

NOTE = (
    "tokens per pass are those of a 135M pair: the widened target has the small model's output, and the "
    "draft, the same for offspec and assisted generation, is that small model quantized to 4 bits; bytes "
    "read by llama.cpp's processes include loading"
)
_PEAKS = ("process_peak_bytes", "cgroup_anon_peak_bytes")
_SAME = {True: "yes", False: "no", None: "-"}


def ceiling_json(disk: Bandwidth, setup: BenchSetup) -> dict[str, Any]:
    """Return the time to read the target's layers once, at the direct read rate of its own files."""
    layers, sizes = setup.recipe["layer_bytes"], setup.quantized_sizes
    found = {
        "raw_bytes_per_s": disk.bytes_per_s,
        "direct": disk.direct,
        "layer_bytes": layers,
        "head_bytes": setup.recipe["head_bytes"],
        "seconds_per_trip": ratio(layers, disk.bytes_per_s),
    }
    if sizes:
        trip = ratio(sizes["quantized_layer_bytes"], disk.bytes_per_s)
        found |= {**sizes, "quantized_seconds_per_trip": trip}
    return found


def show_ceiling(ceiling: Mapping[str, Any], report: Report) -> None:
    how = "O_DIRECT" if ceiling["direct"] else "buffered: O_DIRECT was refused"
    report.ceiling(
        f"{ceiling['seconds_per_trip']:.2f} s per read of the weights: "
        f"{format_bytes(ceiling['layer_bytes'])} "
        f"of layers at {format_bytes(ceiling['raw_bytes_per_s'])}/s ({how}); a program that reads all of "
        "them has at most (tokens per pass) / (this time) tokens per second"
    )
    if "quantized_seconds_per_trip" in ceiling:
        report.ceiling(
            f"{ceiling['quantized_seconds_per_trip']:.2f} s per read in 4 bits: "
            f"{format_bytes(ceiling['quantized_layer_bytes'])} of layers"
        )
    if "target_bytes" in ceiling:
        report.note(
            f"llama.cpp reads {format_bytes(ceiling['target_bytes'])}, with embedding and head in Q4_0, and "
            f"a draft of {format_bytes(ceiling['draft_bytes'])}"
        )


def show(summary: Mapping[str, Any], report: Report) -> None:
    """Print a table for each temperature, one row per contender, then each one's ratio to its ceiling."""
    limit = format_bytes(summary["memory_bytes"])
    for row in summary["runs"]:
        table(row, f"{summary['model']} in {limit}, temperature {row['temperature']:g}", report)
    ceiling = summary["ceiling"]
    for row in summary["runs"]:
        at = f"T {row['temperature']:g}"
        for name, figures in row["contenders"].items():
            if "error" not in figures:
                trip = ceiling["quantized_seconds_per_trip" if name in QUANTIZED else "seconds_per_trip"]
                bound = ratio(figures["tokens_per_pass"], trip)
                report.reached(
                    f"{at}: {_titled(name, figures['settings'])}: {figures['tokens_per_s']:.2f} tok/s "
                    f"({figures['decode_tokens_per_s']:.2f} after the prompt) of the {bound:.2f} that "
                    f"{figures['tokens_per_pass']:.2f} tokens per pass allow",
                    ratio(figures["tokens_per_s"], bound),
                )
        for name, figures in row["contenders"].items():
            tried = figures.get("settings_tried", {})
            if len(tried) > 1:
                speeds = (f"{setting} {one['tokens_per_s']:.2f}" for setting, one in tried.items())
                report.note(f"{at}: {TITLES[name]}, tok/s: {'; '.join(speeds)}")
            for failed in figures.get("failures", ()):
                report.note(
                    f"{at}: {_titled(name, failed['settings'])}: {failed['kind']}: {failed['message']}"
                )
            if figures.get("same_tokens") is False:
                places = (f"{p} at token {place}" for p, place in figures["first_differences"].items())
                report.note(
                    f"{at}: {TITLES[name]} differs from offspec without speculation: {', '.join(places)}"
                )
    report.note(NOTE)


def table(row: Mapping[str, Any], title: str, report: Report) -> None:
    """Print one row per contender; a failed one has its error instead of figures."""
    heads = (
        "", "tok/s", "decoding", "first token, s", "tokens/pass", "read/token",
        "process peak", "cgroup peak, anon", "same tokens", "offspec speed-up", "decode speed-up",
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
