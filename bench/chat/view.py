"""How the chat bench's figures are told, and their limits."""

from __future__ import annotations

from typing import Any

from bench.lib.report import Report

LIMITS = {
    "first_frame_seconds": 1.0,
    "help_seconds": 0.5,
    "key_p95_ms": 50.0,
    "ui_of_a_core": 0.05,
    "ui_of_line_mode": 0.95,
}


def broken(summary: dict[str, Any]) -> list[str]:
    """The limits that the figures do not keep, by name."""
    first, ahead = summary["first_frame_seconds"], summary["torch_loaded_by_first_frame"]
    checks = {
        "first_frame_seconds": first < LIMITS["first_frame_seconds"] and not ahead,
        "help_seconds": summary.get("help_seconds", 0) < LIMITS["help_seconds"],
        "key_p95_ms": summary["keys_generating"]["p95_ms"] < LIMITS["key_p95_ms"],
        "ui_of_a_core": summary["ui_of_a_core_streaming"] < LIMITS["ui_of_a_core"],
        "ui_of_line_mode": summary.get("ui_of_line_mode", 1) > LIMITS["ui_of_line_mode"],
    }
    return [name for name, kept in checks.items() if not kept]


def show_floor(floor: dict[str, Any], report: Report) -> None:
    """What no chat can beat here."""
    echo, app = floor["echo"], floor["textual"]
    report.ceiling(
        f"Python starts in {floor['python_seconds']:.3f} s, with Textual imported "
        f"{floor['textual_import_seconds']:.3f} s; first frame of an empty app after "
        f"{app['first_frame_seconds']:.3f} s"
    )
    report.ceiling(f"key to screen: bare echo {_keys(echo['keys'])}; empty app {_keys(app['keys'])}")
    report.ceiling(f"empty app with nothing to do: {_share(app['idle']['process_of_a_core'])} of a core")


def show(summary: dict[str, Any], report: Report) -> None:
    """One line a figure, beside its floor or its limit."""
    torch = "after" if not summary["torch_loaded_by_first_frame"] else "before"
    report.reached(
        f"first frame after {summary['first_frame_seconds']:.3f} s "
        f"(limit {LIMITS['first_frame_seconds']:g}), torch loaded {torch} it"
    )
    if "help_seconds" in summary:
        report.reached(f"--help in {summary['help_seconds']:.3f} s (limit {LIMITS['help_seconds']:g})")
    for when in ("loading", "generating", "idle"):
        keys = summary[f"keys_{when}"]
        report.reached(f"key to screen, {when}: {_keys(keys)}; {keys['late']} of {keys['keys']} over 50 ms")
    streaming = summary["streaming"]
    report.reached(
        f"UI thread while streaming: {', '.join(_share(row['ui_of_a_core']) for row in streaming)} of a core "
        f"(limit {_share(LIMITS['ui_of_a_core'])}), the process "
        f"{', '.join(_share(row['process_of_a_core']) for row in streaming)}"
    )
    idle = summary["idle_usage"]
    report.reached(
        f"with nothing to do: UI thread {_share(idle['ui_of_a_core'])}, process "
        f"{_share(idle['process_of_a_core'])} of a core"
    )
    if "line_mode_tokens_per_s" in summary:
        report.reached(
            f"{summary['ui_tokens_per_s']:.2f} tok/s in the terminal, "
            f"{summary['line_mode_tokens_per_s']:.2f} in line mode",
            summary["ui_of_line_mode"],
        )
    for name in summary["broken"]:
        report.note(f"limit not kept: {name}")


def _keys(keys: dict[str, Any]) -> str:
    return f"median {keys['median_ms']:.1f}, p95 {keys['p95_ms']:.1f}, most {keys['max_ms']:.1f} ms"


def _share(of_a_core: float) -> str:
    return f"{100 * of_a_core:.1f} %"
