"""Figures of docs/figures.md on the latency of the terminal UI."""

from docs.figure_records.block import Block, in_order
from docs.figure_records.record import Record

CHAT = Record("chat.json")

UI = (
    Block("`python -m bench.chat` (`chat.json`)", CHAT, {"26": CHAT["ui_tokens_per_s"]}),
    Block("| first frame of `offspec chat`", CHAT, {"0.49": CHAT["first_frame_seconds"]}),
    Block("| delay from key to screen", CHAT, {"4.0": CHAT["keys_generating", "median_ms"]}),
    Block("| the same: 95th percentile", CHAT, {"31": CHAT["keys_generating", "p95_ms"]}),
    Block("| the same: maximum", CHAT, {"56": CHAT["keys_generating", "max_ms"]}),
    in_order(
        "| the interface's share of a core",
        CHAT,
        "4.5 5.3",
        tuple(100 * each(run["ui_of_a_core"] for run in CHAT["streaming"]) for each in (min, max)),
    ),
    Block("| its share when idle", CHAT, {"0.3": 100 * CHAT["idle_usage", "ui_of_a_core"]}),
)
