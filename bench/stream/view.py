"""Output of the stream bench: ceilings before the passes, then the results for each number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.lib.report import Report
from bench.stream.floor import Compute
from offspec_planners.measure.disk import RawDisk
from offspec_planners.units import format_bytes

WANTED = 0.95
SHARES = ("utilization", "of_bound", "of_bound_with_attention")


def show_disk(raw: RawDisk, streamed: int, report: Report) -> None:
    """Print the rate of the disk alone, before anything streams. streamed: bytes per pass."""
    rate = raw.read()
    how = "O_DIRECT" if raw.direct else "buffered: O_DIRECT was refused"
    report.ceiling(
        f"{streamed / rate:.2f} s per pass from the disk: {format_bytes(streamed)} of layers at "
        f"{format_bytes(rate)}/s ({how}, {raw.threads} threads, {raw.block >> 20} MiB at a time)"
    )


def show_compute(tokens: int, compute: Compute, flops_per_row: int, report: Report) -> None:
    """Print the processor time of a pass without streaming."""
    rate = flops_per_row * max(tokens, 2) / compute.gemm
    report.ceiling(
        f"{compute.gemm:.3f} s of GEMM in a pass of {tokens} ({rate / 1e9:.0f} GFLOP/s), "
        f"{compute.attention:.3f} s of attention"
    )


def show_row(row: dict[str, Any], report: Report) -> None:
    """Print a pass's time, the link's utilization, and the bound of a pass that misses the target."""
    least, most = row["spread"]["utilization"]
    report.reached(
        f"{row['tokens']:>4} tokens: {row['seconds']:.3f} s per pass, {format_bytes(row['bytes'])} from "
        f"disk, link utilization {row['utilization']:.2f} ({least:.2f} to {most:.2f}, all "
        f"windows as one {row['pooled_utilization']:.2f}); of max(link, GEMM)",
        row["of_bound"],
    )
    if min(row["utilization"], row["of_bound"]) < WANTED:
        bound = "link" if row["link_seconds"] > row["gemm_seconds"] else "processor"
        report.note(
            f"{row['tokens']} tokens, bound by the {bound}: link {row['link_seconds']:.3f} s, GEMM "
            f"{row['gemm_seconds']:.3f}, attention {row['attention_seconds']:.3f}, waiting for weights "
            f"{row['waited_seconds']:.3f}; of the bound with attention {row['of_bound_with_attention']:.2f}"
        )


def shares(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return utilization and the shares of the bounds, by number of tokens."""
    return {name: {str(row["tokens"]): row[name] for row in rows} for name in SHARES}
