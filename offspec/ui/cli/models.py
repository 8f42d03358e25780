"""`offspec models`: what is in the caches, what it needs, and how to fetch and remove it."""

import json
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import ConsoleRenderable

from offspec.core.errors import RequestError
from offspec.ui.cli import completion
from offspec.ui.cli import options as opt
from offspec.ui.cli.other_names import Commands
from offspec.ui.cli.output import Output
from offspec.ui.cli.render import Renderer
from offspec.ui.cli.tables import PageLayout, indented, listing, plain, prose, write_page
from offspec_planners.units import format_bytes

if TYPE_CHECKING:
    from offspec.checkpoint.cached_models import CachedModel
    from offspec_planners.plan import Plan

_HEADS = ("MODEL", "kind", "disk", "RAM", "GPU", "tok/s here")
_FIGURES = 55  # columns that all but the name take

EPILOG = """[bold]Examples[/]

Download a model before it is asked for, and see what it needs:

  offspec models pull Qwen/Qwen3-0.6B

  offspec models

Make room on the disk:

  offspec models rm Qwen/Qwen3-0.6B
"""

app = typer.Typer(cls=Commands, invoke_without_command=True, rich_markup_mode="rich", epilog=EPILOG)


@app.callback()
@opt.takes_options
def models(ctx: typer.Context, as_json: bool = False) -> None:
    """List the models in the caches: their size, what they need, and their speed here where it is known.

    Listed are models of the hub, packs, drafts that were rounded, GGUF files
    that were unpacked, widened models such as [bold]demo-wide[/], and the
    built-in demo. A speed is the prediction of an
    earlier plan; [bold]offspec plan ID[/] makes one.

    Options:
        as_json: Print a list of JSON objects instead of a table.
    """
    if ctx.invoked_subcommand is not None:
        return
    from offspec.checkpoint.cached_models import cached_models

    found, plans = cached_models(), _plans()
    if as_json:
        text = json.dumps([_described(model, plans.get(model.name)) for model in found], ensure_ascii=False)
        Output().write(text + "\n")
        return
    write_page(Output(), lambda layout: _sections(found, plans, layout))


@app.command()
@opt.takes_options
def pull(model: Annotated[str, typer.Argument()], quiet: bool = False) -> None:
    """Download a model into the hub's cache; after an interruption the same command resumes.

    Args:
        model (ID): A hub id: `organisation/name`, with `@revision`, or with `:Q4_K_M` for one of its GGUF
            files; or the address of its page.

    Options:
        quiet: No progress or notices on stderr.
    """
    from offspec.checkpoint.hub import download
    from offspec.checkpoint.hub_name import hub_name

    named = hub_name(model)
    if named is None:
        raise RequestError(
            f"{model} is not a hub id: write organisation/name, or organisation/name:Q4_K_M for a GGUF file"
        )
    with Renderer(as_json=False, quiet=quiet) as renderer:
        path = download(named, renderer.show)
    Output().write(f"{path}\n")


@app.command()
@opt.takes_options
def rm(
    model: Annotated[str, typer.Argument(autocompletion=completion.cached_models)], yes: bool = False
) -> None:
    """Remove a model from its cache, after a question.

    Args:
        model (ID): A name that `offspec models` lists.

    Options:
        yes: Remove it without asking.
    """
    from offspec.checkpoint.cached_models import find_cached, remove_cached

    found = find_cached(model)
    size = format_bytes(found.nbytes)
    if not yes and found.kind != "built in":
        if sys.stdin is None or not sys.stdin.isatty():
            raise RequestError(f"{found.name} ({size}) is removed only after a question, or with --yes")
        typer.confirm(
            f"Remove {found.name} ({size}, {found.kind}) from {found.folder}?", abort=True, err=True
        )
    remove_cached(found)
    Output().write(f"removed {found.name}: {size} free again\n")


def _plans() -> "Mapping[str, Plan]":
    """By model, the fastest of the plans that earlier runs made."""
    from offspec.plan.records import saved_plans

    plans: dict[str, Plan] = {}
    for plan in saved_plans():
        best = plans.get(plan.target)
        if best is None or plan.forecast.tok_per_s > best.forecast.tok_per_s:
            plans[plan.target] = plan
    return plans


def _sections(
    models: "list[CachedModel]", plans: "Mapping[str, Plan]", layout: PageLayout
) -> Iterator[ConsoleRenderable]:
    rows = [(model.name, model.kind, *_figures(model, plans.get(model.name))) for model in models]
    if max(len(row[0]) for row in rows) + _FIGURES > layout.width:
        for name, *figures in rows:  # an id in two lines could not be copied
            yield plain(name, "bold")
            named = zip(figures, ("", " on disk", " of RAM", " of GPU", ""), strict=True)
            yield indented(
                plain(
                    ", ".join(figure + what for figure, what in named if figure).replace(" in ", " tok/s in ")
                )
            )
    else:
        yield listing(_HEADS, (False, False, True, True, True, True), rows, layout)
    total = format_bytes(sum(model.nbytes for model in models))
    least = "RAM, or beside a GPU its memory: about the least that it runs in; the more, the faster."
    yield plain("")
    yield prose([f"{total} in all.", least, "`offspec plan MODEL` says what to expect of it."], layout)


def _figures(model: "CachedModel", plan: "Plan | None") -> list[str]:
    sizes = (model.nbytes, model.least_ram, model.least_vram)
    return [*("" if size is None else f"{size / 1e9:.1f} GB" for size in sizes), _speed(plan)]


def _speed(plan: "Plan | None") -> str:
    if plan is None:
        return ""
    memory = plan.memory if plan.vram is None else plan.vram
    return f"{plan.forecast.tok_per_s:.2g} in {memory / 1e9:.1f} GB"


def _described(model: "CachedModel", plan: "Plan | None") -> dict[str, Any]:
    return {
        "name": model.name,
        "kind": model.kind,
        "folder": str(model.folder),
        "bytes": model.nbytes,
        "least_memory": model.least_ram,
        "least_vram": model.least_vram,
        "tok_per_s": None if plan is None else plan.forecast.tok_per_s,
        "memory": None if plan is None else plan.memory,
        "vram": None if plan is None else plan.vram,
    }
