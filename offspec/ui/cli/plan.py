"""`offspec plan`: measure, decide, predict, and on request validate."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import ConsoleRenderable

from offspec.core.errors import RequestError
from offspec.core.files import probe, write_file
from offspec.plan.prompts import VALIDATION
from offspec.ui.cli import checks, completion
from offspec.ui.cli import options as opt
from offspec.ui.cli.console import Console
from offspec.ui.cli.output import Output
from offspec.ui.cli.render import Renderer
from offspec.ui.cli.tables import PageLayout, facts, listing, plain, prose, write_page

if TYPE_CHECKING:
    from offspec.checkpoint.shapes import KnownSize
    from offspec_planners.plan import Plan
    from offspec_planners.plan.forecast import Validation

_ALL = len(VALIDATION)
MOST_SEQUENCES = 1024
_LIST = "list"
_HEADS = ("MODEL", "disk", "least RAM", "least GPU", "runs here")
_FIGURES = 50  # columns that all but the name take

EPILOG = """[bold]Examples[/]

How fast will it be in four gigabytes, and what would help?

  offspec plan ./Qwen3-8B --memory 4GB

Predicted beside measured speed, with real passes over three prompts:

  offspec plan ./Qwen3-8B --memory 4GB --validate --prompts 3

For another machine, or a model that is not downloaded: the path of its config.json is enough, and
`offspec plan list` lists models that need neither:

  offspec plan meta-llama/Llama-3.1-70B-Instruct --hardware rtx-4090 --draft meta-llama/Llama-3.1-8B-Instruct

The same with its weights in 4 bits:

  offspec plan meta-llama/Llama-3.1-70B-Instruct --hardware rtx-4090 --quantize nf4

For eight answers side by side, which share every pass:

  offspec plan Qwen/Qwen3-8B --hardware laptop-8gb --sequences 8

With another disk in that machine: save its profile, edit it, and plan again:

  offspec hardware rtx-4090 --json > mine.json
  offspec plan meta-llama/Llama-3.1-70B-Instruct --hardware mine.json
"""


@opt.takes_options
def plan(
    options: opt.Options,
    sequences: Annotated[int, typer.Option(min=1, max=MOST_SEQUENCES)] = 1,
    hardware: Annotated[str | None, typer.Option(autocompletion=completion.machines)] = None,
    validate: bool = False,
    prompts: Annotated[int, typer.Option(min=1, max=_ALL)] = _ALL,
    replan: bool = False,
    as_json: bool = False,
    save: Path | None = None,
    quiet: bool = False,
) -> None:
    """Measure this machine, choose placement, draft and tree, and predict the speed.

    generate and chat follow this plan. The page gives its reasons: where
    each layer goes, how large a tree to verify, how long a pass takes and
    what bounds it, and what would help most. `offspec plan list` lists
    models whose sizes are known without a network, and which run here.

    Model and machine:
        sequences (N): Plan for this many answers that share every pass: what they give in all and each, what
            their caches take, and from which number on they take time from each other.
        hardware (NAME|FILE.json): Plan for another machine: a preset such as rtx-4090, or a profile that
            `offspec hardware --json` printed. Nothing is measured, and only the config of the model is
            needed. With `--device cpu` its GPU is left out.

    Plan:
        validate: Answer some prompts by the plan, and print predicted beside measured speed. Takes minutes.
        prompts (N): Prompts to validate with; errors are computed from medians over them.
        replan: Measure and plan again, even if there is a plan for this machine, model, draft and memory.
        as_json: Print the plan as one JSON object instead of a page. With `--validate` the object has the
            keys plan, seconds_per_pass, tok_per_s and tokens_per_pass (each predicted, measured and error),
            and rows, one for each prompt.
        save (FILE): Also write the plan to a file, as JSON that can be edited.
        quiet: No progress or notices on stderr.
    """
    if options.model == _LIST:
        _list(as_json)
        return
    options.params()  # raises RequestError
    if hardware is not None and validate:
        raise RequestError("--validate runs real passes, so it needs this machine; leave out --hardware")
    if save is not None:
        _check_place(save)
    machine = None
    if hardware is not None:
        from offspec.plan.hardware_profile import known_machine

        machine = known_machine(hardware)
    config = options.config(sequences=sequences)
    if machine is None:
        checks.check_files(config, weights=validate)
    with Renderer(as_json=as_json, quiet=quiet) as renderer:
        from offspec.engine import rehearsal as planning  # import torch: after every check of the options
        from offspec.engine import validation

        made = planning.make_plan(config, hardware=machine, replan=replan, notify=renderer.show)
        if save is not None:  # before minutes of validating, which may be interrupted
            _write(save, made)
            renderer.note(f"plan written to {save}")
        found = None
        if validate:
            found = validation.validate_plan(config, made, prompts=VALIDATION[:prompts], notify=renderer.show)
    _print(made, found, as_json=as_json)


def _list(as_json: bool) -> None:
    """The well-known models, without loading torch."""
    from offspec.checkpoint.shapes import known_sizes
    from offspec.core.memory import usable_bytes

    sizes, ram = known_sizes(), usable_bytes()
    if as_json:
        Output().write(json.dumps(_described(sizes, ram)) + "\n")
    else:
        write_page(Output(), lambda layout: _models(sizes, ram, layout))


def _models(sizes: "Mapping[str, KnownSize]", ram: int, layout: PageLayout) -> Iterator[ConsoleRenderable]:
    """A table of models by hub id, and notes on it. ram: bytes that may be used here."""
    rows = [(name, *_figures(size), _verdict(size, ram)) for name, size in sizes.items()]
    if max(len(row[0]) for row in rows) + _FIGURES > layout.width:
        yield facts(
            [
                (name, disk, f"least RAM {least}: {here}" if least else here)
                for name, disk, least, _, here in rows
            ],
            layout,
        )
    else:
        yield listing(_HEADS, (False, True, True, True, False), rows, layout)
    yield plain("")
    yield prose(_notes(sizes, ram), layout)


def _described(sizes: "Mapping[str, KnownSize]", ram: int) -> list[dict[str, Any]]:
    """The same for programs, with null for sizes of a model that is refused."""
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
    return "yes" if size.least_ram <= ram else "too little RAM"


def _notes(sizes: "Mapping[str, KnownSize]", ram: int) -> Iterator[str]:
    yield f"{ram / 1e9:.1f} GB of RAM may be used here; free disk space is not looked at."
    yield "Least RAM is without a GPU, least GPU the memory of one; more of either is faster."
    yield "`offspec plan MODEL --hardware NAME` predicts the speed, with --quantize nf4 in 4 bits."
    for reason in dict.fromkeys(size.refused for size in sizes.values() if size.refused):
        names = [name for name, size in sizes.items() if size.refused == reason]
        yield f"{' and '.join(names)} cannot run: {reason}."


def _print(plan: "Plan", validation: "Validation | None", *, as_json: bool) -> None:
    """The result, to stdout. Raises StdoutClosed and DiskFullError."""
    if as_json:
        value = plan.to_json() if validation is None else {"plan": plan.to_json(), **validation.to_json()}
        Output().write(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n")
        return
    from offspec.ui.cli.plan_page import render

    Output().write_styled(render(Console(highlight=False), plan, validation))


def _check_place(path: Path) -> None:
    """Whether a file can go there, found out before the work. Raises RequestError."""
    if not path.parent.is_dir():
        raise RequestError(f"there is no folder {path.parent} for the plan; make it, or name another")
    if path.exists() and not path.is_file():
        raise RequestError(f"the plan cannot go to {path}, which is not an ordinary file; name a file")
    try:
        probe(path)
    except OSError as error:
        reason = error.strerror or error
        raise RequestError(
            f"the plan cannot be written in {path.parent} ({reason}); name another folder"
        ) from error


def _write(path: Path, plan: "Plan") -> None:
    """Write the plan's file, whole or not at all. Raises RequestError, DiskFullError."""
    try:
        write_file(path, plan.to_text().encode())
    except OSError as error:
        raise RequestError(f"the plan cannot be written to {path}: {error.strerror}") from error
