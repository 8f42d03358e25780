"""`offspec hardware`: what a machine can do, measured here or known from elsewhere."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, ConsoleRenderable
from rich.text import Text

from offspec.core.errors import RequestError
from offspec.core.events import Event, LoadProgress, Notice
from offspec.ui.cli import options as opt
from offspec.ui.cli.live import open_live
from offspec.ui.cli.machine_view import machine_section
from offspec.ui.cli.output import Output
from offspec.ui.cli.tables import Look, heading, indented, page, plain
from offspec.ui.printable import printable

if TYPE_CHECKING:
    from offspec_planners.hardware import Hardware

EPILOG = """[bold]Examples[/]

Measure again, with the disk that a folder lies on:

  offspec hardware --again --path /data/models

A preset as a file to edit, for `offspec plan --hardware mine.json`:

  offspec hardware rtx-4090 --json > mine.json
"""

_PRESETS = "list"

Name = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME",
        help="A machine to show instead of this one: a preset, such as [bold]rtx-4090[/], or a JSON file; "
        "[bold]list[/] names the presets.",
        show_default=False,
    ),
]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        metavar="",
        help="Print the profile as JSON, which can be edited.",
        rich_help_panel=opt.OUTPUT_PANEL,
    ),
]
Disk = Annotated[
    Path | None,
    typer.Option(
        "--path",
        metavar="DIR",
        help="Measure the disk that this folder lies on. Without it: the disk with the models in the caches.",
        rich_help_panel=opt.MODEL_PANEL,
    ),
]
Again = Annotated[
    bool,
    typer.Option(
        "--again",
        metavar="",
        help="Measure even though there is a profile from before.",
        rich_help_panel=opt.MODEL_PANEL,
    ),
]


def hardware(
    name: Name = None,
    as_json: AsJson = False,
    path: Disk = None,
    again: Again = False,
    device: opt.Device = "cpu",
    quiet: opt.Quiet = False,
) -> None:
    """Measure this machine, or show a known one: disk, link, memory, arithmetic.

    Takes some seconds the first time; the profile is kept for later runs.
    """
    out = Output()
    if name is None:
        found, when = _measured(path, again, device, quiet)
    elif path is not None or again:
        raise RequestError(f"--path and --again measure this machine; leave out {name!r} for that")
    elif name == _PRESETS:
        from offspec_planners.hardware import preset_names

        out.write("".join(f"{preset}\n" for preset in preset_names()))
        return
    else:
        from offspec.plan.hardware_profile import known_machine

        found, when = known_machine(name), None
    if as_json:
        out.write(found.text())
    else:
        out.write_styled(_page(found, when))


def _measured(path: Path | None, again: bool, device: str, quiet: bool) -> "tuple[Hardware, str]":
    """The profile of this machine, and when it was measured; progress and notices go to stderr."""
    err = Console(stderr=True, highlight=False)
    live = open_live(err, wanted=not quiet and sys.stderr.isatty())

    def show(event: Event) -> None:
        if isinstance(event, LoadProgress):
            live.progress(event)
        elif isinstance(event, Notice) and not quiet:
            err.print(Text(printable(event.text)), soft_wrap=True)

    try:
        live.status("starting")
        from offspec.plan.hardware_profile import profile

        found = profile(device, show, again=again, folder=path)
    except KeyboardInterrupt:
        live.stop()
        err.print("stopped")
        raise
    finally:
        live.stop()
    return found.hardware, found.measured


def _page(machine: "Hardware", when: str | None) -> str:
    """The profile as text for this terminal."""
    return page(Console(highlight=False), lambda look: _sections(machine, when, look))


def _sections(machine: "Hardware", when: str | None, look: Look) -> Iterator[ConsoleRenderable]:
    yield from machine_section(machine, look)
    if when is not None:
        yield indented(plain(f"measured {when}; --again measures anew", "dim"))
    if machine.sources:
        yield heading("Where the figures come from")
        yield from (indented(plain(source)) for source in machine.sources)
