"""`offspec hardware`: measured rates of this machine, or rates of a preset."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import ConsoleRenderable

from offspec.core.errors import RequestError
from offspec.ui.cli import completion
from offspec.ui.cli import options as opt
from offspec.ui.cli.output import StdoutWriter
from offspec.ui.cli.render import Renderer
from offspec.ui.cli.tables import PageLayout, facts, heading, indented, listing, plain, series, write_page
from offspec_planners.units import format_bytes, format_number, format_rate

if TYPE_CHECKING:
    from offspec_planners.hardware_rates import Hardware, Rate

EPILOG = """[bold]Examples[/]

Measure again, using the disk of a folder:

  offspec hardware --again --path /data/models

Save a preset to edit, for `offspec plan --hardware mine.json`:

  offspec hardware rtx-4090 --json > mine.json
"""

_PRESETS = "list"


@opt.takes_options
def hardware(
    name: Annotated[str | None, typer.Argument(autocompletion=completion.hardware_names_or_list)] = None,
    as_json: bool = False,
    path: Path | None = None,
    again: bool = False,
    device: str = "auto",
    quiet: bool = False,
) -> None:
    """Measure this machine, or show a preset: speed of disk, PCIe, memory and computation.

    The first measurement takes a few seconds and is saved for later runs.

    Args:
        name (NAME): Machine to show instead of this one: a preset such as `rtx-4090`, or a JSON file. `list`
            lists the presets.

    Model and hardware:
        path (DIR): Folder whose disk is measured. Default: the disk of the model caches.
        again: Measure again even if a profile is saved.

    Prompt and output:
        as_json: Print the profile as JSON, which can be edited.
        quiet: Suppress progress, notices and statistics on stderr.
    """
    out = StdoutWriter()
    if name is None:
        with Renderer(as_json=False, quiet=quiet) as renderer:
            from offspec.plan.hardware_profile import profile

            here = profile(device, renderer.show, remeasure=again, folder=path)
        found, when = here.hardware, here.measured
    elif path is not None or again:
        raise RequestError(f"--path and --again measure this machine, not {name!r}; omit one or the other")
    elif name == _PRESETS:
        write_page(out, _presets)
        return
    else:
        from offspec.plan.hardware_profile import load_hardware

        found, when = load_hardware(name), ""
    if as_json:
        out.write(found.text())
    else:
        write_page(out, lambda layout: _sections(found, when, layout))


def _presets(layout: PageLayout) -> Iterator[ConsoleRenderable]:
    """Yield a table of the presets: memory, and the rates that limit a pass."""
    from offspec_planners.hardware_rates import preset, preset_names

    machines = [(name, preset(name)) for name in preset_names()]
    rows = [
        (
            name,
            "no GPU" if machine.link is None else format_bytes(machine.processor.memory),
            format_bytes(machine.ram),
            format_rate(machine.disk.value),
            "" if machine.link is None else format_rate(machine.link.value),
        )
        for name, machine in machines
    ]
    if layout.narrow:
        yield facts([(name, vram, f"{ram} of RAM, disk {disk}") for name, vram, ram, disk, _ in rows], layout)
        return
    heads = ("preset", "VRAM", "RAM", "disk", "RAM to VRAM")
    yield listing(heads, (False, True, True, True, True), rows, layout)


def _sections(machine: "Hardware", when: str, layout: PageLayout) -> Iterator[ConsoleRenderable]:
    yield from machine_section(machine, layout)
    if when:
        yield indented(plain(f"measured {when}; --again measures it again", "dim"))
    if machine.sources:
        yield heading("Sources of the figures")
        yield from (indented(plain(source)) for source in machine.sources)


def machine_section(machine: "Hardware", layout: PageLayout) -> Iterator[ConsoleRenderable]:
    """Yield heading, rates with spread, and matrix-product speed at several row counts."""
    origin = "from published figures" if machine.sources else "measured"
    yield heading(f"Machine, {origin}: {machine.name}")
    chip = machine.processor
    memory = "" if machine.link is None else f", {format_bytes(chip.memory)} of VRAM"
    rows = [
        ("processor", f"{chip.name}{memory}", ""),
        ("RAM", format_bytes(machine.ram), ""),
        ("disk, direct reads", *_rate(machine.disk)),
    ]
    if chip.read_memory:
        rows.append((f"{'RAM' if machine.link is None else 'VRAM'} bandwidth", *_rate(chip.bandwidth)))
    if machine.link is not None:
        rows.insert(3, ("RAM to VRAM", *_rate(machine.link)))
    if machine.host is not None:
        rows.append(("CPU", machine.host.name, ""))
        rows.append(("RAM bandwidth", *_rate(machine.host.bandwidth)))
    yield facts(rows, layout)
    yield series("16-bit GEMM", *_flops(chip.gemm), layout)
    if machine.host is not None:
        yield series("16-bit GEMM on the CPU", *_flops(machine.host.gemm), layout)


def _rate(rate: "Rate") -> tuple[str, str]:
    """Return the rate and the range of its readings."""
    spread = "" if rate.low == rate.high else f"{format_number(rate.low / 1e9)} to {format_rate(rate.high)}"
    return format_rate(rate.value), spread


def _flops(gemm: tuple[tuple[int, float], ...]) -> tuple[tuple[str, str], list[tuple[int, str]]]:
    """Return axis names and points of the curve, in the unit that suits its highest point."""
    unit, size = ("TFLOP/s", 1e12) if max(rate for _, rate in gemm) >= 1e12 else ("GFLOP/s", 1e9)
    return ("rows", unit), [(rows, format_number(rate / size)) for rows, rate in gemm]
