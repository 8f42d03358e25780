"""Output of the kernels bench: the device's limits, then each case's ceiling, times and memory."""

from __future__ import annotations

from typing import Any

from bench.kernels.cases import OURS
from bench.kernels.timing import Rates
from bench.lib.report import Report
from offspec_planners.units import format_bytes

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def format_seconds(seconds: float) -> str:
    """Return seconds with three digits, in a suitable unit."""
    unit, name = next((found for found in _UNITS if seconds >= found[0]), _UNITS[-1])
    return f"{seconds / unit:.3g} {name}"


def show_rates(rates: Rates, report: Report) -> None:
    products = ", ".join(f"{rate / 1e9:.0f} GFLOP/s in {dtype}" for dtype, rate in rates.flops_per_s.items())
    report.ceiling(f"products: {products}; memory: {format_bytes(rates.bytes_per_s)}/s")


def show_ceiling(row: dict[str, Any], report: Report) -> None:
    line = f"{format_bytes(row['nbytes'])} take {format_seconds(row['memory_seconds'])}"
    if row["flops"]:
        line = f"{row['flops'] / 1e9:.3g} GFLOP take {format_seconds(row['products_seconds'])}, {line}"
    report.ceiling(f"{row['case']}: {line}")


def show_case(row: dict[str, Any], report: Report) -> None:
    """Print the figures of a case, or why it is wrong."""
    checked = row["checked"]
    if not checked["passed"]:
        report.note(
            f"WRONG: the error of {checked['at']} is {checked['error']:.3g}, above the limit of "
            f"{checked['limit']:.3g}; {row['case']} was not timed"
        )
        return
    if not row["right"]:
        apart = ", ".join(f"{name} by {error:.3g}" for name, error in row["rivals_differ_by"].items())
        report.note(f"WRONG: {row['case']} differs from {apart}; it was not timed")
        return
    ways = ", ".join(f"{name} {format_seconds(timing['seconds'])}" for name, timing in row["ways"].items())
    faster = "".join(f"; {times:.2f} times {kind}" for kind, times in row["speedup"].items())
    report.reached(f"{row['path']} path: {ways}{faster}; of the ceiling", row["of_ceiling"])
    report.note(f"scratch {format_bytes(row['scratch_bytes'])}; the docstring: {row['scratch_stated']}")
    if "dense_mask_bytes" in row:
        report.note(f"a dense mask is {format_bytes(row['dense_mask_bytes'])}")
    if "flex_mask_seconds" in row:
        report.note(
            f"FlexAttention's mask of blocks takes {format_seconds(row['flex_mask_seconds'])}, not counted"
        )
    if "asking_seconds" in row["ways"][OURS]:
        report.note(f"the host takes {format_seconds(row['ways'][OURS]['asking_seconds'])} to launch it")
    for name, why in row["failed"].items():
        report.note(f"{name} cannot run: {why}")
    for short in row["missed"]:
        report.note(f"MISSED: {short}")


def show_steps(rows: list[dict[str, Any]], report: Report) -> None:
    """Print draft steps with and without CUDA graphs, by width."""
    for row in rows:
        report.reached(
            f"draft step of {row['width']:>3}: {format_seconds(row['graphs_seconds'])} from a graph, "
            f"{format_seconds(row['plain_seconds'])} without; {row['gain']:.2f} times as fast"
        )
