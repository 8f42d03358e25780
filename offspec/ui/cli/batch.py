"""`offspec batch`: run requests from a file."""

import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offspec.core.config import AUTO, SamplingParams
from offspec.core.errors import OffspecError, RequestError
from offspec.ui import interrupt
from offspec.ui.cli import checks, completion
from offspec.ui.cli import options as opt
from offspec.ui.cli.output import StdoutWriter
from offspec.ui.cli.render import Renderer
from offspec.ui.cli.serve import check_installed, default_model_name
from offspec.ui.printable import printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from offspec.server.batch.lines import Line
    from offspec.server.batch.offline_run import OfflineBatchRun
    from offspec.server.batch.results import ResultFile

EPILOG = """[bold]Examples[/]

One request per line, as {"prompt": "..."} or {"messages": [...]}, plus any field of Chat Completions:

  offspec batch questions.jsonl answers.jsonl ./Qwen3-32B --draft ./Qwen3-0.6B

A file in the format of OpenAI's Batch API whose lines name the model gpt-4o:

  offspec batch requests.jsonl results.jsonl ./Qwen3-32B --alias gpt-4o

On every machine of this machine's Ray cluster:

  offspec batch questions.jsonl answers.jsonl Qwen/Qwen3-32B --ray auto

After an interruption, the same command resumes. To check the input without a model:

  offspec batch questions.jsonl --validate
"""

_MOST_REPORTED = 10  # invalid lines listed without --validate

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
    """Run requests from a JSONL file and append each result to an output file.

    Sampling options set defaults for lines that omit them. Failed lines get
    an error as their result; the others continue.

    Args:
        requests (IN.jsonl): Input file with one request per line.
        results (OUT.jsonl): Output file; results are appended as they finish. For a name that ends in
            .parquet they are collected in NAME.jsonl and converted at the end.
        model (MODEL): Model to run.

    Batch:
        validate: Only check the input and report each invalid line.
        alias (NAME): Extra name for the model in input lines. Repeatable.
        ray (ADDRESS): Run on a Ray cluster: at an address, `auto` for the cluster of this machine, or `local`
            for a new one on this machine alone. Each machine or GPU loads the model from its own paths.
        ray_actors (N): Number of engines on the cluster.
        quiet: Suppress progress and notices on stderr.
    """
    check_installed()
    from offspec.server.batch.lines import read_lines

    if Path(model).suffix in (".jsonl", ".parquet"):
        raise RequestError(f"{model} is not a model; the model is the last argument: {_USAGE}")
    if ray_actors is not None and ray is None:
        raise RequestError("--ray-actors has no effect without a cluster: add --ray, or omit --ray-actors")
    sampling = options.overrides()
    defaults = sampling.apply_to(SamplingParams()) if validate else None
    lines = list(read_lines(requests, defaults=defaults))
    wrong = [line for line in lines if line.fault is not None]
    if validate or len(wrong) == len(lines):
        _report_lines(wrong, len(wrong) if validate else _MOST_REPORTED)
        _check_lines(requests, len(lines), len(wrong))
        count = "the request is" if len(lines) == 1 else f"all {len(lines)} requests are"
        StdoutWriter().write(f"{count} valid\n")
        return
    if results is None or not model:
        raise RequestError(f"name a file for the results and a model: {_USAGE}")
    if results.resolve() == requests.resolve():
        raise RequestError(f"{results} is the file of requests: name another file for the results")
    config = options.config(model=model, sequences=AUTO)
    if ray is None:
        checks.check_files(config, options.plan)

    from offspec.server.batch.results import check_parquet_installed, write_parquet

    kept = results
    if results.suffix == ".parquet":
        check_parquet_installed()
        kept = results.with_name(f"{results.name}.jsonl")
    names = tuple(dict.fromkeys([*(alias or ()), default_model_name(model)]))
    if not quiet:
        _report_lines(wrong, _MOST_REPORTED)

    def make(file: "ResultFile", renderer: Renderer) -> "OfflineBatchRun":
        if ray is not None:
            from offspec.ray.run import RayBatchRun

            given: Any = {"names": names, "sampling": sampling, "address": ray, "actors": ray_actors}
            return RayBatchRun(config, file, renderer.show, plan=options.plan, **given)

        from offspec.server.batch.offline_run import BatchRun
        from offspec.server.service import Service
        from offspec.server.settings import Settings
        from offspec.ui.chat.setup import open_engine

        load = partial(open_engine, config, options.plan)
        service = Service(load, Settings(served_model_names=names, sampling=sampling))
        return BatchRun(service, file, renderer.show)

    answered = _answer(lines, kept, make, quiet)
    if kept is not results:
        write_parquet(kept, results)
    if not answered:
        raise OffspecError(f"all lines failed; {results} holds the error of each")


def _answer(
    lines: "list[Line]",
    results: Path,
    make: "Callable[[ResultFile, Renderer], OfflineBatchRun]",
    quiet: bool,
) -> bool:
    """Answer the lines that have no result yet, and show progress.

    Returns False if lines were run and all of them failed.

    make: function that makes a run from the result file and the renderer.
    """
    from offspec.server.batch.results import ResultFile

    with ResultFile(results) as file, Renderer(as_json=False, quiet=quiet) as renderer:
        ids = {line.id for line in lines}
        done, earlier = len(ids & file.done), len(ids & file.failed)
        if done:
            renderer.note(f"{done} of {len(lines)} results are already in {results}")
        run = make(file, renderer)
        stop: Any = getattr(run, "stop", None)  # a run without `stop` is ended by an exception

        def on_interrupt() -> None:
            interrupt.end_on_interrupt()
            stop()

        try:
            with nullcontext() if stop is None else interrupt.override_handler(on_interrupt):
                run.run(lines)
        except KeyboardInterrupt:
            done = len(ids & file.done)
            renderer.note(f"{done} of {len(lines)} results are in {results}: run the same command to resume")
            raise
        failed = len(ids & file.failed)
        errors = f", {failed} of them errors" if failed else ""
        if earlier:
            errors += f" ({earlier} from earlier runs: delete those lines to retry them)"
        count = "1 result is" if len(lines) == 1 else f"{len(lines)} results are"
        renderer.note(f"{count} in {results}{errors}; {run.tokens} tokens in this run")
        return failed == earlier or failed - earlier < len(lines) - done


def _report_lines(wrong: "list[Line]", most: int) -> None:
    """Print the faults of at most `most` lines."""
    for line in wrong[:most]:
        assert line.fault is not None
        sys.stderr.write(f"line {line.number}: {printable(line.fault.message)}\n")
    if len(wrong) > most:
        sys.stderr.write(f"and {len(wrong) - most} more lines; --validate lists all\n")


def _check_lines(path: Path, count: int, wrong: int) -> None:
    """Raise RequestError if the file has no lines, or invalid ones."""
    if not count:
        raise RequestError(f'{path} has no requests: write one per line, such as {{"prompt": "Why?"}}')
    if wrong:
        raise RequestError(f"{wrong} of {count} lines of {path} are invalid; correct or remove them")
