"""How the offload bench is told: ceilings before the runs, a table and the shares of the ceilings after."""

from __future__ import annotations

from typing import Any

from bench.lib.report import Report, grid, ratio
from bench.lib.tally import Ceiling
from offspec.core.config import format_bytes

NOTE = (
    "acceptance is that of a 135M pair: the widened target says what the small model says, and the draft is "
    "that small model rounded to 4 bits; the cost of a pass and the text are real"
)


def show_ceiling(ceiling: Ceiling, report: Report) -> None:
    """The floor of a pass from the disk and from the processor, before anything is run."""
    disk = ceiling.bandwidth
    how = "O_DIRECT" if disk.direct else "buffered: O_DIRECT was refused"
    report.ceiling(
        f"{ceiling.link_seconds:.2f} s a pass from the disk: {format_bytes(ceiling.layer_bytes)} of layers "
        f"at {format_bytes(disk.bytes_per_s)}/s ({how})"
    )
    for tokens, rate in sorted(ceiling.gemm.items()):
        report.ceiling(
            f"{ceiling.compute_seconds(tokens):.2f} s a pass of {tokens} tokens from the processor "
            f"({rate / 1e9:.0f} GFLOP/s)"
        )


def show(summary: dict[str, Any], report: Report) -> None:
    """One column for each temperature, then the shares of the ceiling."""
    title = f"{summary['model']} in {format_bytes(summary['memory_bytes'])}, {summary['draft']}"
    view = grid(title, "", *(f"T {row['temperature']:g}" for row in summary["runs"]))
    lines = (
        ("off, s a token", "off_seconds_per_token", "{:.2f}"),
        ("on, tokens a s", "on_tokens_per_s", "{:.2f}"),
        ("speed-up", "speed_up", "{:.2f}"),
        ("tokens a pass (135M pair)", "tokens_per_pass", "{:.2f}"),
        ("nodes a pass", "nodes_per_pass", "{:.0f}"),
        ("on, s a pass", "on_seconds_per_pass", "{:.2f}"),
        ("  of it draft, s", "on_draft_seconds_per_pass", "{:.2f}"),
        ("prompts with another token", "prompts_with_another_token", "{}"),
        ("link use, off", "off_link_use", "{:.2f}"),
        ("link use, on", "on_link_use", "{:.2f}"),
    )
    for label, key, form in lines:
        view.add_row(label, *(form.format(row[key]) for row in summary["runs"]))
    for label, key in (
        ("peak of the cgroup, page cache in it", "cgroup_peak_bytes"),
        ("peak of its anonymous memory", "cgroup_anon_peak_bytes"),
        ("peak of the process", "process_peak_bytes"),
    ):
        view.add_row(label, *(format_bytes(row[key]) if row.get(key) else "-" for row in summary["runs"]))
    report.out.print(view)
    for row in summary["runs"]:
        report.reached(
            f"T {row['temperature']:g}: {row['on_seconds_per_pass']:.2f} s a pass on, disk or processor "
            f"alone {row['ceiling_seconds_per_pass']:.2f}; {row['on_tokens_per_s']:.2f} tokens a s of "
            f"{row['ceiling_tokens_per_s']:.2f} that these tokens a pass allow",
            ratio(row["on_tokens_per_s"], row["ceiling_tokens_per_s"]),
        )
    report.note(NOTE)
