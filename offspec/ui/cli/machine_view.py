"""A machine on a page: the rates of its disk, its link, its memory and its arithmetic, with their spread."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import ConsoleRenderable

from offspec.ui.cli.tables import Look, facts, heading, series
from offspec_planners.units import format_bytes, format_number, format_rate

if TYPE_CHECKING:
    from offspec_planners.hardware import Hardware, Rate


def machine_section(machine: "Hardware", look: Look) -> Iterator[ConsoleRenderable]:
    """Heading, rates with spread, and the speed of products at several row counts."""
    origin = "from published figures" if machine.sources else "measured"
    yield heading(f"The machine, {origin}: {machine.name}")
    chip = machine.processor
    memory = "" if machine.link is None else f", {format_bytes(chip.memory)} of VRAM"
    rows = [
        ("processor", f"{chip.name}{memory}", ""),
        ("RAM", format_bytes(machine.ram), ""),
        ("disk, past the cache", *_rate(machine.disk)),
        (f"{'RAM' if machine.link is None else 'VRAM'} is read at", *_rate(chip.bandwidth)),
    ]
    if machine.link is not None:
        rows.insert(3, ("RAM to VRAM", *_rate(machine.link)))
    yield facts(rows, look)
    yield series("16-bit products", *_flops(chip.gemm), look)


def _rate(rate: "Rate") -> tuple[str, str]:
    """The figure, and how far apart its readings are."""
    spread = "" if rate.low == rate.high else f"{format_number(rate.low / 1e9)} to {format_rate(rate.high)}"
    return format_rate(rate.value), spread


def _flops(gemm: tuple[tuple[int, float], ...]) -> tuple[tuple[str, str], list[tuple[int, str]]]:
    """Names and points of the curve, in the unit that suits its highest point."""
    unit, size = ("TFLOP/s", 1e12) if max(rate for _, rate in gemm) >= 1e12 else ("GFLOP/s", 1e9)
    return ("rows", unit), [(rows, format_number(rate / size)) for rows, rate in gemm]
