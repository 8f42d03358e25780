"""`offspec batch`: many requests from a file."""

import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offspec.core.config import AUTO
from offspec.core.errors import OffspecError, RequestError
from offspec.ui import interrupt
from offspec.ui.cli import checks, completion
from offspec.ui.cli import options as opt
from offspec.ui.cli.output import Output
from offspec.ui.cli.render import Renderer
from offspec.ui.cli.serve import check_installed, own_name
from offspec.ui.printable import printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from offspec.server.batch.lines import Line
    from offspec.server.batch.results import ResultFile
    from offspec.server.batch.run import LineRun

EPILOG = """[bold]Examples[/]

Questions, one a line, as {"prompt": "..."} or {"messages": [...]}, with any field of Chat Completions:

  offspec batch questions.jsonl answers.jsonl ./Qwen3-32B --draft ./Qwen3-0.6B

A file in the format of OpenAI's batch API, whose lines name the model gpt-4o:

  offspec batch requests.jsonl results.jsonl ./Qwen3-32B --alias gpt-4o

On every machine of a Ray cluster that this one belongs to:

  offspec batch questions.jsonl answers.jsonl Qwen/Qwen3-32B --ray auto

Interrupted or killed, the same command goes on from there. Without a model the input is only checked:

  offspec batch questions.jsonl --validate
"""

_MOST_REPORTED = 10  # wrong lines, unless they are asked for

_USAGE = "offspec batch IN.jsonl OUT.jsonl MODEL"


@opt.takes_options
def batch(
    requests: Annotated[Path, typer.Argument(show_default=False)],
    results: Annotated[Path | None, typer.Argument(show_default=False)] = None,
    model: Annotated[str, typer.Argument(show_default=False, autocompletion=completion.models)] = "",
    *,
    options: opt.Options,
    validate: bool = False,
    alias: list[str] | None = None,
    ray: str | None = None,
    ray_actors: Annotated[int | None, typer.Option(min=1, show_default="as many as fit")] = None,
    quiet: bool = False,
) -> None:
    """Answer many requests from a file, and add each result to another as soon as it is there.

    Sampling options set defaults for lines that omit them. A line that cannot
    be answered has its error for a result; the others go on.

    Args:
        requests (IN.jsonl): Requests, one a line.
        results (OUT.jsonl): Where results are added, in the order in which they finish. A name that ends in
            .parquet is for a table in the end; until then they are in a file of that name with .jsonl behind
            it.
        model (MODEL): What answers.

    Batch:
        validate: Check the input alone, and say what is wrong with each line.
        alias (NAME): What lines call the model, beside its own name.
        ray (ADDRESS): Answer on a Ray cluster: `auto` is the one that this machine belongs to, `local` a new
            one of this machine alone. Each machine, or each GPU, loads the model; paths are those there.
        ray_actors (N): Engines on the cluster.
        quiet: No progress or notices on stderr.
    """
    check_installed()
    from offspec.server.batch.lines import read_lines

    if Path(model).suffix in (".jsonl", ".parquet"):
        raise RequestError(f"{model} is not a model, which comes last: {_USAGE}")
    lines = list(read_lines(requests))
    wrong = [line for line in lines if line.fault is not None]
    if validate or len(wrong) == len(lines):
        _report_lines(wrong, len(wrong) if validate else _MOST_REPORTED)
        _check_lines(requests, len(lines), len(wrong))
        Output().write(f"{len(lines)} requests can be asked\n")
        return
    if results is None or not model:
        raise RequestError(f"name a file for the results and a model: {_USAGE}")
    if results.resolve() == requests.resolve():
        raise RequestError(f"{results} has the requests: name another file for the results")
    config = options.config(model=model, sequences=AUTO)
    sampling = options.overrides()
    if ray is None:
        checks.check_files(config, options.plan)

    from offspec.server.batch.results import check_parquet_installed, write_parquet

    kept = results
    if results.suffix == ".parquet":
        check_parquet_installed()
        kept = results.with_name(f"{results.name}.jsonl")
    names = tuple(dict.fromkeys([*(alias or ()), own_name(model)]))
    if not quiet:
        _report_lines(wrong, _MOST_REPORTED)

    def make(file: "ResultFile", renderer: Renderer) -> "LineRun":
        if ray is not None:
            from offspec.ray.run import RayBatchRun

            given: Any = {"names": names, "sampling": sampling, "address": ray, "actors": ray_actors}
            return RayBatchRun(config, file, renderer.show, plan=options.plan, **given)

        from offspec.server.batch.run import BatchRun
        from offspec.server.service import Service
        from offspec.server.settings import Settings
        from offspec.ui.chat.setup import open_engine

        load = partial(open_engine, config, options.plan)
        service = Service(load, Settings(names=names, sampling=sampling))
        return BatchRun(service, file, renderer.show)

    answered = _answer(lines, kept, make, quiet)
    if kept is not results:
        write_parquet(kept, results)
    if not answered:
        raise OffspecError(f"none of the lines could be answered; {results} has the error of each")


def _answer(
    lines: "list[Line]",
    results: Path,
    make: "Callable[[ResultFile, Renderer], LineRun]",
    quiet: bool,
) -> bool:
    """Answer what is not answered yet, and show progress.

    make: makes a run, by the file and who shows it. Return False if lines were asked and all of them failed.
    """
    from offspec.server.batch.results import ResultFile

    with ResultFile(results) as file, Renderer(as_json=False, quiet=quiet) as renderer:
        ids = {line.id for line in lines}
        done, earlier = len(ids & file.done), len(ids & file.failed)
        if done:
            renderer.note(f"{done} of {len(lines)} results are in {results} already")
        run = make(file, renderer)
        stop: Any = getattr(run, "stop", None)  # a run without it is ended by an exception

        def struck() -> None:
            interrupt.ending()
            stop()

        try:
            with nullcontext() if stop is None else interrupt.instead(struck):
                run.run(lines)
        except KeyboardInterrupt:
            done = len(ids & file.done)
            renderer.note(
                f"{done} of {len(lines)} results are in {results}: the same command goes on from there"
            )
            raise
        failed = len(ids & file.failed)
        errors = f", {failed} of them errors" if failed else ""
        if earlier:
            errors += f" ({earlier} from earlier runs: delete those lines to retry them)"
        said = "1 result is" if len(lines) == 1 else f"{len(lines)} results are"
        renderer.note(f"{said} in {results}{errors}; {run.tokens} tokens in this run")
        return failed == earlier or failed - earlier < len(lines) - done


def _report_lines(wrong: "list[Line]", most: int) -> None:
    """Print what is wrong with lines, `most` of them at most."""
    for line in wrong[:most]:
        assert line.fault is not None
        sys.stderr.write(f"line {line.number}: {printable(line.fault.message)}\n")
    if len(wrong) > most:
        sys.stderr.write(f"and {len(wrong) - most} more lines, which --validate lists\n")


def _check_lines(path: Path, count: int, wrong: int) -> None:
    """Raise RequestError if the file has no lines, or some that cannot be asked."""
    if not count:
        raise RequestError(f'{path} has no requests: write one a line, such as {{"prompt": "Why?"}}')
    if wrong:
        raise RequestError(f"{wrong} of {count} lines of {path} cannot be asked")
