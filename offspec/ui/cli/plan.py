"""`offspec plan`: measure, plan, predict, and optionally validate."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import ConsoleRenderable

from offspec.core.errors import RequestError
from offspec.core.files import probe_writable, write_atomic
from offspec.plan.calibration_prompts import VALIDATION
from offspec.ui.cli import checks, completion
from offspec.ui.cli import options as opt
from offspec.ui.cli.console import Console
from offspec.ui.cli.output import StdoutWriter
from offspec.ui.cli.render import Renderer
from offspec.ui.cli.tables import PageLayout, facts, listing, plain, prose, write_page

if TYPE_CHECKING:
    from offspec.checkpoint.known_models import KnownSize
    from offspec_planners.plan import Plan
    from offspec_planners.plan.forecast import Validation

_ALL = len(VALIDATION)
MOST_SEQUENCES = 1024
_LIST = "list"
_HEADS = ("MODEL", "disk", "min. RAM", "min. VRAM", "runs here")
_FIGURES = 50  # columns of everything except the name

EPILOG = """[bold]Examples[/]

Predict the speed in 4 GB, and what would improve it:

  offspec plan ./Qwen3-8B --memory 4GB

Compare predicted with measured speed, on three prompts:

  offspec plan ./Qwen3-8B --memory 4GB --validate --prompts 3

For another machine, without downloading the model (a local config.json is enough, and `offspec plan list`
lists models that need no files):

  offspec plan meta-llama/Llama-3.1-70B-Instruct --hardware rtx-4090 --draft meta-llama/Llama-3.1-8B-Instruct

The same model quantized to 4 bits:

  offspec plan meta-llama/Llama-3.1-70B-Instruct --hardware rtx-4090 --quantize nf4

For eight concurrent requests:

  offspec plan Qwen/Qwen3-8B --hardware laptop-8gb --sequences 8

For that machine with another disk: save its profile, edit it, and plan again:

  offspec hardware rtx-4090 --json > mine.json
  offspec plan meta-llama/Llama-3.1-70B-Instruct --hardware mine.json
"""


@opt.takes_options
def plan(
    options: opt.Options,
    sequences: Annotated[int, typer.Option(min=1, max=MOST_SEQUENCES)] = 1,
    hardware: Annotated[str | None, typer.Option(autocompletion=completion.hardware_names)] = None,
    validate: bool = False,
    prompts: Annotated[int, typer.Option(min=1, max=_ALL)] = _ALL,
    replan: bool = False,
    as_json: bool = False,
    save: Path | None = None,
    quiet: bool = False,
) -> None:
    """Measure this machine, choose placement, draft and tree size, and predict the speed.

    generate and chat use this plan. The page shows the placement of each
    layer, the tree size, the time and bottleneck of a pass, and what would
    improve the speed most. `offspec plan list` lists models with sizes
    known offline, and whether they run here.

    Model and hardware:
        sequences (N): Number of concurrent requests to plan for: total and individual speed, memory of the
            KV caches, and the number at which they begin to slow each other down.
        hardware (NAME|FILE.json): Machine to plan for instead of this one: a preset such as rtx-4090, or a
            profile printed by `offspec hardware --json`. `--device cpu` ignores its GPU.

    Plan:
        validate: Answer prompts with the plan, and compare predicted with measured speed. Takes minutes.
        prompts (N): Number of prompts for the validation; errors are computed from their medians.
        replan: Measure and plan again even if a plan for this machine, model, draft and memory is saved.
        as_json: Print the plan as one JSON object instead of a page. `--validate` adds predicted and measured
            speeds.
        save (FILE): Also write the plan to a JSON file, which can be edited.
        quiet: Suppress progress and notices on stderr.
    """
    if options.model == _LIST:
        _list(as_json)
        return
    options.params()  # raises RequestError
    if hardware is not None and validate:
        raise RequestError("--validate runs real passes on this machine; omit --hardware")
    if save is not None:
        _check_writable(save)
    machine = None
    if hardware is not None:
        from offspec.plan.hardware_profile import load_hardware

        machine = load_hardware(hardware)
    config = options.config(sequences=sequences)
    if machine is None:
        checks.check_files(config, weights=validate)
    with Renderer(as_json=as_json, quiet=quiet) as renderer:
        from offspec.engine import calibration_run, validation  # import torch: after every check of options

        made = calibration_run.make_plan(config, hardware=machine, replan=replan, notify=renderer.show)
        if save is not None:  # before minutes of validation, which may be interrupted
            _write(save, made)
            renderer.note(f"plan written to {save}")
        found = None
        if validate:
            found = validation.validate_plan(config, made, prompts=VALIDATION[:prompts], notify=renderer.show)
    _print(made, found, as_json=as_json)


def _list(as_json: bool) -> None:
    """Print the models whose sizes are known offline, without importing torch."""
    from offspec.checkpoint.known_models import known_sizes
    from offspec.core.memory import usable_bytes

    sizes, ram = known_sizes(), usable_bytes()
    if as_json:
        StdoutWriter().write(json.dumps(_to_json(sizes, ram)) + "\n")
    else:
        write_page(StdoutWriter(), lambda layout: _models(sizes, ram, layout))


def _models(sizes: "Mapping[str, KnownSize]", ram: int, layout: PageLayout) -> Iterator[ConsoleRenderable]:
    """Yield a table of models by Hugging Face id, and notes. ram: usable bytes on this machine."""
    rows = [(name, *_figures(size), _verdict(size, ram)) for name, size in sizes.items()]
    if max(len(row[0]) for row in rows) + _FIGURES > layout.width:
        yield facts(
            [
                (name, disk, f"minimum RAM {least}: {here}" if least else here)
                for name, disk, least, _, here in rows
            ],
            layout,
        )
    else:
        yield listing(_HEADS, (False, True, True, True, False), rows, layout)
    yield plain("")
    yield prose(_notes(sizes, ram), layout)


def _to_json(sizes: "Mapping[str, KnownSize]", ram: int) -> list[dict[str, Any]]:
    """Return the list of models for `--json`, with null for sizes of an unsupported model."""
    return [
        {
            "name": name,
            "bytes": size.nbytes or None,
            "least_memory": size.least_ram or None,
            "least_vram": size.least_vram or None,
            "runs": not size.refused and size.least_ram <= ram,
            "refused": size.refused or None,
        }
        for name, size in sizes.items()
    ]


def _figures(size: "KnownSize") -> tuple[str, str, str]:
    if size.refused:
        return "", "", ""
    disk = f"{size.nbytes / 1e9:.{0 if size.nbytes > 1e11 else 1}f} GB"
    return disk, f"{size.least_ram / 1e9:.1f} GB", f"{size.least_vram / 1e9:.1f} GB"


def _verdict(size: "KnownSize", ram: int) -> str:
    if size.refused:
        return "cannot run"
    return "yes" if size.least_ram <= ram else "not enough RAM"


def _notes(sizes: "Mapping[str, KnownSize]", ram: int) -> Iterator[str]:
    yield f"{ram / 1e9:.1f} GB of RAM are usable here; free disk space is not checked."
    yield "Minimum RAM applies without a GPU, minimum VRAM with one; more of either is faster."
    yield "`offspec plan MODEL --hardware NAME` predicts the speed; add --quantize nf4 for 4 bits."
    for reason in dict.fromkeys(size.refused for size in sizes.values() if size.refused):
        names = [name for name, size in sizes.items() if size.refused == reason]
        yield f"{' and '.join(names)} cannot run: {reason}."


def _print(plan: "Plan", validation: "Validation | None", *, as_json: bool) -> None:
    """Write the result to stdout. Raises StdoutClosed and DiskFullError."""
    if as_json:
        value = plan.to_json() if validation is None else {"plan": plan.to_json(), **validation.to_json()}
        StdoutWriter().write(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n")
        return
    from offspec.ui.cli.plan_page import render

    StdoutWriter().write_styled(render(Console(highlight=False), plan, validation))


def _check_writable(path: Path) -> None:
    """Check before the work that the plan can be written. Raises RequestError."""
    if not path.parent.is_dir():
        raise RequestError(
            f"the folder {path.parent} for the plan does not exist; create it, or name another"
        )
    if path.exists() and not path.is_file():
        raise RequestError(f"the plan cannot be written to {path}: not a regular file; name another")
    try:
        probe_writable(path)
    except OSError as error:
        reason = error.strerror or error
        raise RequestError(
            f"the plan cannot be written to {path.parent} ({reason}); name another folder"
        ) from error


def _write(path: Path, plan: "Plan") -> None:
    """Write the plan's file atomically. Raises RequestError, DiskFullError."""
    try:
        write_atomic(path, plan.to_text().encode())
    except OSError as error:
        raise RequestError(f"the plan cannot be written to {path}: {error.strerror}") from error
