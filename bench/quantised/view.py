"""How the quantised bench is told: floors first, passes beside their bounds, then tokens a second."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.lib.report import Report, grid, ratio
from bench.quantised.tally import BF16, NF4
from offspec.core.config import format_bytes

NOTE = (
    "tokens a pass are those of a 135M pair: the widened target says what the small model says, in one case "
    "rounded to NF4, and the draft is that small model rounded to 4 bits"
)


def show_ceiling(ceiling: Mapping[str, Any], report: Report) -> None:
    """The floors of a pass from the disk and from the processor, before anything is run."""
    how = "O_DIRECT" if ceiling["direct"] else "buffered: O_DIRECT was refused"
    for kind, nbytes in ceiling["layer_bytes"].items():
        seconds = ratio(nbytes, ceiling["raw_bytes_per_s"])
        report.ceiling(
            f"{seconds:.2f} s a pass in {kind} from the disk: {format_bytes(nbytes)} of layers at "
            f"{format_bytes(ceiling['raw_bytes_per_s'])}/s ({how})"
        )
    unpacking = ceiling["unpacking_seconds"]
    report.ceiling(
        f"{unpacking:.2f} s a pass to unpack all layers, "
        f"{format_bytes(ratio(ceiling['unpacked_bytes'], unpacking))}/s of packed bytes"
    )
    for rows, floor in ceiling["by_rows"].items():
        report.ceiling(
            f"{floor['gemm_seconds']:.2f} s a pass of {rows} rows for the products, "
            f"{floor['together_seconds']:.2f} s with unpacking in the same go"
        )


def show(summary: Mapping[str, Any], report: Report) -> None:
    """A column for each target and number of tokens, then the answers, then the shares of the bounds."""
    limit = format_bytes(summary["memory_bytes"])
    columns = [(row["tokens"], kind, row[kind]) for row in summary["passes"] for kind in (BF16, NF4)]
    heads = (f"{kind}, {tokens}" for tokens, kind, _ in columns)
    view = grid(f"{summary['model']} in {limit}, seconds of a pass", "", *heads)
    view.add_row("bytes a pass", *(format_bytes(found["bytes"]) for _, _, found in columns))
    for label, key in (
        ("s a pass", "seconds"),
        ("link", "link_seconds"),
        ("unpacking", "unpacking_seconds"),
        ("products", "gemm_seconds"),
        ("whole layers, nothing to unpack", "layers_seconds"),
        ("of the bound", "over_bound"),
    ):
        view.add_row(label, *(f"{found[key]:.2f}" for _, _, found in columns))
    report.out.print(view)
    for row in summary["passes"]:
        found, bound = row[NF4], row[NF4]["bound_seconds"]
        report.reached(
            f"{row['tokens']} tokens: {row['bytes_ratio']:.2f} times fewer bytes, {row['speed_up']:.2f} "
            f"times as fast; {found['seconds']:.2f} s where link or processor take {bound:.2f}",
            ratio(bound, found["seconds"]),
        )
    if summary["answers"]:
        show_answers(summary["answers"], summary["draft"], report)
    report.note(NOTE)


def show_answers(answered: Mapping[str, Any], draft: str, report: Report) -> None:
    """tok/s of both targets by how the trees are sized."""
    heads = ("", "tok/s", "tokens a pass", "s a pass", "of it draft", "bytes a pass")
    view = grid(f"answers, {draft}", "budget and width", *heads)
    for way, both in answered["ways"].items():
        for kind in (BF16, NF4):
            found = both[kind]
            keys = ("tokens_per_s", "tokens_per_pass", "seconds_per_pass", "draft_seconds_per_pass")
            cells = [f"{found[key]:.2f}" for key in keys]
            view.add_row(way if kind == BF16 else "", kind, *cells, format_bytes(found["bytes_per_pass"]))
    report.out.print(view)
    for way, both in answered["ways"].items():
        report.reached(f"{way}: {both['gain']:.2f} times the tokens a second of bfloat16")
    best = answered["fastest_tokens_per_s"]
    report.reached(
        f"each at its best: {best[NF4]:.2f} tokens a second in NF4, {best[BF16]:.2f} in bfloat16, "
        f"{answered['fastest_gain']:.2f} times"
    )
