"""`offspec models`: list, download and remove cached models."""

import json
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import ConsoleRenderable

from offspec.core.errors import RequestError
from offspec.ui.cli import completion
from offspec.ui.cli import options as opt
from offspec.ui.cli.command_aliases import AliasedGroup
from offspec.ui.cli.output import StdoutWriter
from offspec.ui.cli.render import Renderer
from offspec.ui.cli.short_help import ShortHelpCommand
from offspec.ui.cli.tables import PageLayout, indented, listing, plain, prose, write_page
from offspec_planners.units import format_bytes

if TYPE_CHECKING:
    from offspec.checkpoint.cached_models import CachedModel
    from offspec_planners.plan import Plan

_HEADS = ("MODEL", "kind", "disk", "RAM", "GPU", "tok/s here")
_FIGURES = 55  # columns of everything except the name

EPILOG = """[bold]Examples[/]

Download a model in advance, and see what it needs:

  offspec models pull Qwen/Qwen3-0.6B

  offspec models

Free disk space:

  offspec models rm Qwen/Qwen3-0.6B
"""

app = typer.Typer(cls=AliasedGroup, invoke_without_command=True, rich_markup_mode="rich", epilog=EPILOG)


@app.callback()
@opt.takes_options
def models(ctx: typer.Context, as_json: bool = False) -> None:
    """List cached models with size, minimum memory, and predicted speed if known.

    The list includes Hugging Face downloads, packs, quantized drafts,
    unpacked GGUF files, widened models such as [bold]demo-wide[/], and the
    built-in demo. Speeds are predictions of earlier plans;
    [bold]offspec plan ID[/] makes one.

    Options:
        as_json: Print a list of JSON objects instead of a table.
    """
    if ctx.invoked_subcommand is not None:
        return
    from offspec.checkpoint.cached_models import cached_models

    found, plans = cached_models(), _plans()
    if as_json:
        text = json.dumps([_to_json(model, plans.get(model.name)) for model in found], ensure_ascii=False)
        StdoutWriter().write(text + "\n")
        return
    write_page(StdoutWriter(), lambda layout: _sections(found, plans, layout))


@app.command(cls=ShortHelpCommand)
@opt.takes_options
def pull(model: Annotated[str, typer.Argument()], quiet: bool = False) -> None:
    """Download a model into the Hugging Face cache. After an interruption, the same command resumes.

    Args:
        model (ID): Hugging Face id: `organization/name`, optionally with `@revision` or with `:Q4_K_M` for
            one of its GGUF files; or the URL of its page.

    Options:
        quiet: Suppress progress and notices on stderr.
    """
    from offspec.checkpoint.hub import download
    from offspec.checkpoint.hub_name import hub_name

    named = hub_name(model)
    if named is None:
        raise RequestError(
            f"{model} is not a Hugging Face model id; write organization/name, such as Qwen/Qwen3-8B, or "
            "organization/name:Q4_K_M for a GGUF file"
        )
    with Renderer(as_json=False, quiet=quiet) as renderer:
        path = download(named, renderer.show)
    StdoutWriter().write(f"{path}\n")


@app.command(cls=ShortHelpCommand)
@opt.takes_options
def rm(
    model: Annotated[str, typer.Argument(autocompletion=completion.cached_models)], yes: bool = False
) -> None:
    """Delete a model from its cache (asks for confirmation).

    Args:
        model (ID): A name that `offspec models` lists.

    Options:
        yes: Delete without confirmation.
    """
    from offspec.checkpoint.cached_models import find_cached, remove_cached

    found = find_cached(model)
    size = format_bytes(found.nbytes)
    if not yes and found.kind != "built in":
        if sys.stdin is None or not sys.stdin.isatty():
            raise RequestError(f"refusing to delete {found.name} ({size}) without confirmation; pass --yes")
        typer.confirm(
            f"Remove {found.name} ({size}, {found.kind}) from {found.folder}?", abort=True, err=True
        )
    remove_cached(found)
    StdoutWriter().write(f"removed {found.name}: {size} free again\n")


def _plans() -> "Mapping[str, Plan]":
    """Return the fastest plan of earlier runs for each model."""
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
        for name, *figures in rows:  # an id broken into two lines could not be copied
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
    least = "RAM and GPU: approximate minimum memory without and with a GPU; more is faster."
    yield plain("")
    yield prose([f"{total} total.", least, "`offspec plan MODEL` predicts the speed."], layout)


def _figures(model: "CachedModel", plan: "Plan | None") -> list[str]:
    sizes = (model.nbytes, model.min_ram, model.min_vram)
    return [*("" if size is None else f"{size / 1e9:.1f} GB" for size in sizes), _speed(plan)]


def _speed(plan: "Plan | None") -> str:
    if plan is None:
        return ""
    memory = plan.memory if plan.vram is None else plan.vram
    return f"{plan.forecast.tok_per_s:.2g} in {memory / 1e9:.1f} GB"


def _to_json(model: "CachedModel", plan: "Plan | None") -> dict[str, Any]:
    return {
        "name": model.name,
        "kind": model.kind,
        "folder": str(model.folder),
        "bytes": model.nbytes,
        "least_memory": model.min_ram,
        "least_vram": model.min_vram,
        "tok_per_s": None if plan is None else plan.forecast.tok_per_s,
        "memory": None if plan is None else plan.memory,
        "vram": None if plan is None else plan.vram,
    }
