"""`offspec bench`: speed of a model on this machine, as a table to paste."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import ConsoleRenderable

from offspec.core.errors import OffspecError, RequestError
from offspec.ui.cli import checks
from offspec.ui.cli import options as opt
from offspec.ui.cli.output import StdoutWriter
from offspec.ui.cli.render import Renderer
from offspec.ui.cli.tables import PageLayout, facts, heading, write_page
from offspec_planners.units import format_number

if TYPE_CHECKING:
    from offspec.engine.benchmark import Benchmark, Generation

EPILOG = """[bold]Examples[/]

Speed with and without speculation, in 12 GB of RAM:

  offspec bench Qwen/Qwen3-8B --memory 12GB --draft Qwen/Qwen3-0.6B

As Markdown, for an issue or a forum:

  offspec bench Qwen/Qwen3-8B --memory 12GB --markdown

Save a run, and compare a later one with it:

  offspec bench Qwen/Qwen3-8B --memory 12GB --json > before.json
  offspec bench Qwen/Qwen3-8B --memory 12GB --check before.json
"""

_SEED = 1


@opt.takes_options
def bench(
    options: opt.Options,
    seconds: Annotated[float, typer.Option(min=1)] = 90.0,
    markdown: bool = False,
    as_json: bool = False,
    check: Path | None = None,
    quiet: bool = False,
) -> None:
    """Measure a model's speed on this machine: prefill, decoding, and the gain from speculation.

    Answers four fixed prompts with and without a draft. Prints machine,
    model, placement, speeds, and the speed that the plan predicted.

    Benchmark:
        seconds (SECONDS): Time limit of the answers, excluding loading and planning.
        markdown: Print a Markdown table.
        as_json: Print one JSON object.
        check (FILE): Compare with an earlier run, saved from `--json`. The exit code is 1 if tokens differ or
            a speed differs by more than 15 %.

    Prompt and output:
        quiet: Suppress progress, notices and statistics on stderr.
    """
    if markdown and as_json:
        raise RequestError("--markdown and --json exclude each other: omit one")
    config = options.config()
    params = options.params()
    params = params if params.seed is not None else replace(params, seed=_SEED)
    checks.check_files(config, options.plan)
    before = None if check is None else _load_previous(check)
    with Renderer(as_json=False, quiet=quiet) as renderer:
        from offspec.engine.benchmark import benchmark, setting_differences
        from offspec.engine.load import load

        with load(config, plan=options.plan, notify=renderer.show) as engine:
            found = benchmark(engine, config, params, seconds, renderer.show)
    out = StdoutWriter()
    if as_json:
        out.write(json.dumps(found.to_json(), indent=2) + "\n")
    elif markdown:
        out.write(_markdown(found))
    else:
        write_page(out, lambda layout: _sections(found, layout))
    if not found.same:
        raise OffspecError(
            "speculation changed the answer, which is a bug in offspec: please report the model and options"
        )
    if before is not None and (found_other := setting_differences(before, found)):
        raise OffspecError(f"this run differs from {check}: {'; '.join(found_other)}")
    if before is not None:
        typer.echo(f"matches {check}", err=True)


def _load_previous(file: Path) -> "Benchmark":
    """Read an earlier run. Raises RequestError."""
    from offspec.engine.benchmark import Benchmark

    try:
        return Benchmark.read(file.read_bytes())
    except OSError as error:
        raise RequestError(f"--check {file} cannot be read: {error.strerror or error}") from None
    except RequestError as error:
        raise RequestError(f"--check {file}: {error}") from None


def _settings(found: "Benchmark") -> list[tuple[str, str, str]]:
    return [(name, value, "") for name, value in {**found.machine, **found.settings}.items()]


def _rows(found: "Benchmark") -> Iterator[tuple[str, str, str]]:
    """Yield name, figure and remark of each speed."""
    predicted = found.predicted
    yield "prompt", f"{format_number(found.prompt_tok_per_s)} tok/s", f"{found.prompt_tokens} tokens"
    if found.speculates:
        yield "with speculation", *_speed(found.drafted)
        yield "without", *_speed(found.alone)
        gain = f"{format_number(found.speedup)} times" if found.speedup else "unknown"
        yield "gain", gain, "same tokens" if found.same else "DIFFERENT TOKENS, which is a bug"
    else:
        yield "generation", *_speed(found.drafted)
    if found.link:
        rate = f"of {found.link_rate / 1e9:.2f} GB/s" + ", with speculation" * found.speculates
        yield f"{found.link} bandwidth used", f"{found.link_share:.0%}", rate
    else:
        yield "weights", "in memory", "none streamed"
    if predicted is not None:
        yield (
            "predicted",
            f"{format_number(predicted.tok_per_s)} tok/s",
            f"{format_number(predicted.tokens_per_pass)} tokens per pass; "
            f"{format_number(predicted.tok_per_s_alone)} tok/s without speculation",
        )


def _speed(found: "Generation") -> tuple[str, str]:
    """Return tokens per second and a remark on the measured tokens and passes."""
    if not found.tok_per_s:
        return "unknown", "the time limit was too short; raise --seconds"
    passes = "1 pass" if found.passes == 1 else f"{found.passes} passes"
    paused = f", drafting paused in {found.paused_passes}" if found.paused_passes else ""
    return (
        f"{format_number(found.tok_per_s)} tok/s",
        f"{found.tokens} tokens in {passes}, {format_number(found.tokens_per_pass)} tokens per pass{paused}",
    )


def _sections(found: "Benchmark", layout: PageLayout) -> Iterator[ConsoleRenderable]:
    yield heading("Machine and model")
    yield facts(_settings(found), layout)
    yield heading("Speed")
    yield facts(list(_rows(found)), layout)


def _markdown(found: "Benchmark") -> str:
    rows = [*_settings(found), *_rows(found)]
    head = f"offspec {found.offspec}, torch {found.torch}, {found.date}, seed {found.seed}"
    cells = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    return "\n".join([f"{head}\n", "| | | |", "|---|---|---|", *cells]) + "\n"
