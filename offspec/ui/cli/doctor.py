"""`offspec doctor`: what this machine has, whether each part works, and what to do about what does not."""

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from offspec import __version__
from offspec.core.errors import RequestError
from offspec.ui import interrupt
from offspec.ui.cli import options as opt
from offspec.ui.cli.console import Console
from offspec.ui.cli.output import Live, Output
from offspec.ui.cli.tables import plain, wrapped
from offspec.ui.told import with_installer

if TYPE_CHECKING:
    from offspec.engine.doctor.finding import Finding, State

EPILOG = """[bold]Examples[/]

First thing on a new machine or a new GPU:

  offspec doctor

With the disk of a folder of models, too:

  offspec doctor /data/models

For a bug report:

  offspec doctor --json > doctor.json

[bold]Exit code[/]

0 where nothing fails (what is slower than it could be does not count), 1 where a part does not work.
"""

_STYLES: "dict[State, str]" = {"ok": "green", "limited": "yellow", "failed": "bold red", "absent": "dim"}
_STATE, _LEFT = 9, 32  # columns: of the state; of state and part together
_NARROWEST, _WIDEST = 32, 110


@opt.takes_options
def doctor(
    folders: Annotated[list[Path] | None, typer.Argument()] = None, as_json: bool = False, quiet: bool = False
) -> None:
    """Check that driver, torch, kernels, memory and disks of this machine work.

    Each part is tried, not just looked up: a kernel is compiled, memory is
    pinned, files are read past the page cache, and a small model answers
    on the processor and on every GPU, with the same tokens. Every line that
    is not well says what to do, and one says whether models are computed
    on the GPU. Takes half a minute.

    Args:
        folders ([DIR]...): Folders with models, whose disks are looked at beside those of the caches.

    Prompt and output:
        as_json: Print one JSON object: offspec, ok, complete, and findings, each with part, state (ok,
            limited, failed or absent), found, remedy and figures.
        quiet: No progress, notices or statistics on stderr.
    """
    for folder in folders or ():
        if not folder.is_dir():
            raise RequestError(f"there is no folder {folder}; give one on a disk with models")
    from offspec.engine.doctor.examine import examine
    from offspec.engine.doctor.finding import Asked, Begun, Finding

    out, console, err = Output(), Console(highlight=False), Console(stderr=True, highlight=False)
    live = Live(err, wanted=not quiet and err.is_terminal)
    found, now, complete = list[Finding](), "", False
    try:
        with closing(examine(Asked(tuple(folders or ())))) as news:
            for event in news:
                if isinstance(event, Begun):
                    now = event.title
                    live.status(f"checking: {now}")
                    continue
                found.append(event)
                live.stop()
                if not as_json:
                    out.write_styled(_line(console, event))
        complete = True
    except KeyboardInterrupt:
        live.stop()
        at = f" while checking: {now}; {len(found)} findings before that" if now else ""
        err.print_line(f"stopped{at}")
        interrupt.was_said()
        raise
    finally:
        live.stop()
        _end(found, complete, as_json, out)
    if any(finding.state == "failed" for finding in found):
        raise typer.Exit(1)


def _end(found: "Sequence[Finding]", complete: bool, as_json: bool, out: Output) -> None:
    """The JSON object, or the line below the report."""
    if as_json:
        report = {
            "offspec": __version__,
            "ok": complete and all(finding.state != "failed" for finding in found),
            "complete": complete,
            "findings": [finding.to_json() for finding in found],
        }
        out.write(json.dumps(report, ensure_ascii=False, indent=1) + "\n")
    elif complete:
        out.write_styled("\n" + _summary(found) + "\n")


def _summary(found: "Sequence[Finding]") -> str:
    """Count of failures, or what passed and which checks need something installed before they can run."""
    states = [finding.state for finding in found]
    failed, limited = states.count("failed"), states.count("limited")
    if failed:
        return f"{failed} of {len(states)} fail. For a bug report: offspec doctor --json"
    slow = f", {limited} of them slower than they could be" if limited else ""
    skipped = [finding.part for finding in found if finding.state == "absent" and finding.remedy]
    if skipped:
        return f"Nothing was tried for: {'; '.join(skipped)}. The other checks pass{slow}."
    return f"All that was tried works{slow}."


def _line(console: Console, finding: "Finding") -> str:
    """One finding as text for this terminal; what to do about it is a line of its own, which is not cut."""
    room = min(console.width, _WIDEST) - _LEFT
    head = Text.assemble((f"{finding.state:<{_STATE}}", _STYLES[finding.state]), plain(finding.part))
    found = wrapped(finding.found, room if room >= _NARROWEST else console.width)
    if len(head) < _LEFT and room >= _NARROWEST:
        head.append(" " * (_LEFT - len(head))).append_text(plain(found.pop(0)))
    left = " " * (_LEFT if room >= _NARROWEST else 0)
    lines = [head, *(plain(left + line) for line in found)]
    if finding.remedy:
        lines.append(plain(f"{left}-> {with_installer(finding.remedy)}", "bold"))
    with console.capture() as captured:
        console.print(*lines, sep="\n", soft_wrap=True)
    return captured.get()
