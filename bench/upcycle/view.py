"""What the upcycle bench prints: the ceiling first, then a line for each way, and what the aims are about."""

from __future__ import annotations

from typing import Any

from bench.lib.report import Report, grid
from bench.upcycle.tally import TITLES, Ceiling
from offspec.core.config import format_bytes

NOTE = (
    "routers are random: real ones choose more alike in related texts; tokens per pass are those of a 135M "
    "pair: the draft is the small model in 4 bits"
)

_COLUMNS = (
    ("tok/s", "tokens_per_s", ".2f"),
    ("tok/pass", "tokens_per_pass", ".2f"),
    ("nodes", "nodes_per_pass", ".0f"),
    ("s/pass", "seconds_per_pass", ".2f"),
    ("MB/tok", "bytes_per_token", "MB"),
    ("disk tok/s", "disk_tokens_per_s", ".2f"),
    ("experts", "experts_per_pass", ".0f"),
    ("hits", "hit_rate", ".2f"),
    ("best", "best_hit_rate", ".2f"),
    ("of link", "of_link", ".2f"),
)


def show_ceiling(ceiling: Ceiling, recipe: dict[str, Any], report: Report) -> None:
    mixture = recipe["mixture"]
    report.ceiling(
        f"{ceiling.tokens_per_s:.2f} tokens a s without a draft: {ceiling.asked} experts of "
        f"{format_bytes(ceiling.expert_bytes)}, {ceiling.missed:.2f} of them missed if all were alike, are "
        f"{format_bytes(int(ceiling.token_bytes))} a token at {format_bytes(ceiling.bandwidth)}/s"
    )
    seconds = recipe["experts_bytes"] * ceiling.missed / ceiling.bandwidth
    report.ceiling(f"{seconds:.2f} s a pass that reads all {mixture['experts']} experts that are not kept")
    third = recipe["shares"][: -(-mixture["experts"] // 3)]
    report.note(f"the third of the experts that is chosen most has {sum(third):.2f} of the choices")


def show(row: dict[str, Any], report: Report) -> None:
    """One line a way, then what the aims are about."""
    view = grid(
        f"{row['case']} in {format_bytes(row['memory_bytes'])}", "", *(head for head, _, _ in _COLUMNS)
    )
    for name, way in row["ways"].items():
        told = (
            ("failed",) if "error" in way else tuple(_cell(way.get(key), form) for _, key, form in _COLUMNS)
        )
        view.add_row(TITLES[name], *told)
    report.out.print(view)
    for name, value in row["ratios"].items():
        report.reached(name.replace("_", " "), value)
    report.note(NOTE)


def _cell(value: float | None, form: str) -> str:
    if value is None:
        return "-"
    return f"{value / 1e6:.0f}" if form == "MB" else f"{value:{form}}"
