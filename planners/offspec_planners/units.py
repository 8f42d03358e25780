"""Formatting of figures for people: three significant digits and a suitable unit."""

import math


def format_bytes(size: int | float) -> str:
    """Format `1_500_000_000` as `1.50 GB` (decimal units, as for disks)."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit in ("B", "KB") else f"{size:.2f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


def format_number(value: float, digits: int = 3) -> str:
    """Format a number with three significant digits, never with an exponent: 0.0213, 1.60, 24.8, 1,940."""
    if not value or not math.isfinite(value):
        return f"{value:.0f}"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, places)  # 9.996 becomes 10.0, with one decimal less
    places = digits - 1 - math.floor(math.log10(abs(rounded)))
    return f"{rounded:,.{max(places, 0)}f}"


def format_count(count: int, what: str) -> str:
    """Format `1 node`, `1,024 nodes`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def format_seconds(seconds: float, places: int | None = None) -> str:
    """Format `0.0213` as `21.3 ms`, `1.6` as `1.60 s`, `562` as `9 min`, `7200` as `2 h 00 min`.

    Args:
        seconds: Duration in seconds.
        places: Decimals of a duration under two minutes, for a display that is updated repeatedly.
    """
    if seconds < 120 and places is not None:
        return f"{seconds:.{places}f} s"
    if 0 < seconds < 0.1:
        return f"{format_number(seconds * 1e3)} ms"
    if seconds < 120:
        return f"{format_number(seconds) if seconds else 0} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def format_rate(per_second: float) -> str:
    """Format bytes per second, `2_100_000_000` as `2.10 GB/s`."""
    return f"{format_bytes(per_second)}/s"
