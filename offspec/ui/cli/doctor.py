"""`offspec doctor`: test each part of this machine and suggest remedies."""

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
from offspec.ui.cli.output import LiveLine, StdoutWriter
from offspec.ui.cli.tables import plain, wrapped
from offspec.ui.messages import with_installer

if TYPE_CHECKING:
    from offspec.engine.doctor.finding import Finding, State

EPILOG = """[bold]Examples[/]

First thing on a new machine or a new GPU:

  offspec doctor

Also test the disk of a folder of models:

  offspec doctor /data/models

For a bug report:

  offspec doctor --json > doctor.json

[bold]Exit code[/]

0 if nothing fails (slower than possible is not a failure), 1 if a part does not work.
"""

_STYLES: "dict[State, str]" = {"ok": "green", "limited": "yellow", "failed": "bold red", "absent": "dim"}
_STATE, _LEFT = 9, 32  # columns: of the state; of state and part together
_NARROWEST, _WIDEST = 32, 110


@opt.takes_options
def doctor(
    folders: Annotated[list[Path] | None, typer.Argument()] = None, as_json: bool = False, quiet: bool = False
) -> None:
    """Check that driver, torch, kernels, memory and disks of this machine work.

    Each part is tested, not just looked up: a kernel is compiled, memory is
    pinned, files are read with direct I/O, and a small model generates the
    same tokens on the CPU and on every GPU. Each problem comes with a
    remedy, and one line reports whether models run on the GPU. Takes half
    a minute.

    Args:
        folders ([DIR]...): Folders with models; their disks are tested in addition to those of the caches.

    Prompt and output:
        as_json: Print one JSON object: offspec, ok, complete, and findings, each with part, state (ok,
            limited, failed or absent), found, remedy and figures.
        quiet: Suppress progress, notices and statistics on stderr.
    """
    for folder in folders or ():
        if not folder.is_dir():
            raise RequestError(f"folder {folder} does not exist; give one on a disk with models")
    from offspec.engine.doctor.finding import CheckStarted, DoctorOptions, Finding
    from offspec.engine.doctor.run_checks import run_checks

    out, console, err = StdoutWriter(), Console(highlight=False), Console(stderr=True, highlight=False)
    live = LiveLine(err, wanted=not quiet and err.is_terminal)
    found, now, complete = list[Finding](), "", False
    try:
        with closing(run_checks(DoctorOptions(tuple(folders or ())))) as news:
            for event in news:
                if isinstance(event, CheckStarted):
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
        interrupt.mark_reported()
        raise
    finally:
        live.stop()
        _end(found, complete, as_json, out)
    if any(finding.state == "failed" for finding in found):
        raise typer.Exit(1)


def _end(found: "Sequence[Finding]", complete: bool, as_json: bool, out: StdoutWriter) -> None:
    """Write the JSON object, or the summary line below the report."""
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
    """Return the number of failures, or which checks passed and which need something installed first."""
    states = [finding.state for finding in found]
    failed, limited = states.count("failed"), states.count("limited")
    if failed:
        return f"{failed} of {len(states)} checks failed. For a bug report: offspec doctor --json"
    slow = f", {limited} of them slower than possible" if limited else ""
    skipped = [finding.part for finding in found if finding.state == "absent" and finding.remedy]
    if skipped:
        return f"Not tested: {'; '.join(skipped)}. All other checks passed{slow}."
    return f"All checks passed{slow}."


def _line(console: Console, finding: "Finding") -> str:
    """Format a finding for this terminal; its remedy is a separate line, which is not truncated."""
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
