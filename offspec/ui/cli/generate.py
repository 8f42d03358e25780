"""`offspec generate`: from options to a request, from a request to an answer."""

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from offspec import __version__
from offspec.core.config import NONE, Constraint, EngineConfig, SamplingParams, check_comparable
from offspec.core.errors import OffspecError, RequestError
from offspec.core.trace import Timeline, check_writable
from offspec.ui.cli import checks
from offspec.ui.cli import options as opt
from offspec.ui.cli.plain_input import MOST_INPUT
from offspec.ui.cli.render import Renderer
from offspec_planners.units import format_bytes

EPILOG = """[bold]Examples[/]

The small model that comes with the project, in one gigabyte:

  offspec generate demo "Why is the sky blue?" --memory 1GB

A large model with a small one as its draft, sampled, from a pipe:

  cat question.txt | offspec generate ./Qwen3-32B --draft ./Qwen3-0.6B --temperature 0.7 --seed 1

Two draft sources at once: a trained head, and passages copied from the text that is to be edited:

  cat letter.txt | offspec generate ./Qwen3-32B --draft AngelSlim/Qwen3-32B_eagle3,suffix
"""


@opt.takes_options
def generate(
    options: opt.Options,
    prompt: Annotated[str | None, typer.Argument()] = None,
    no_speculation: bool = False,
    check: bool = False,
    system: str | None = None,
    raw: bool = False,
    max_tokens: int = 256,
    stop: list[str] | None = None,
    ignore_eos: bool = False,
    as_json: bool = False,
    logprobs: int | None = None,
    quiet: bool = False,
    trace: Path | None = None,
    json_schema: Path | None = None,
    open_schemas: bool = False,
    regex: str | None = None,
) -> None:
    """Answer one prompt. The text goes to stdout as it comes, everything else to stderr.

    Args:
        prompt (PROMPT): The prompt. Left out, or `-`, it is read from standard input, without the newline at
            its end.

    Speculation: how fast:
        no_speculation: Decode one token per pass, without a draft.
        check: Decode a second time without speculation and compare: every token must be the same. Where one
            is not, that is a bug, and the exit code is 1. The model's sampling defaults do not apply.

    Rules: what may come and what may not:
        json_schema (FILE): The answer is JSON that this schema allows. One that `--max-tokens` cuts is not
            yet.
        open_schemas: Allow objects of a JSON schema properties that it does not name, as JSON Schema does. By
            default they are closed unless the schema says otherwise, since small models add one after the
            other.
        regex (REGEX): The whole answer matches this regular expression.

    Prompt and output:
        system (TEXT): A system message before the prompt.
        raw: Continue the prompt as it is, without the model's chat template.
        as_json: Print one JSON object with the text, the token ids and the statistics instead of the text.
        logprobs (K): With `--json`: of each token its log-probability by the model itself, before rules and
            temperature, and the K likeliest tokens with theirs.
        trace (FILE): Write a timeline of reads, copies, layers and draft steps. Open it at
            https://ui.perfetto.dev to see what waits for what; with a name that ends in .gz it is compressed.
        quiet: No progress, notices or statistics on stderr.
    """
    if no_speculation:  # what would not be asked need not be loaded
        options = replace(options, values=options.values | {"draft": NONE})
    config = options.config()
    sampling = options.overrides(
        max_tokens=max_tokens,
        stop=stop or (),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        format=_format(json_schema, regex, open_schemas),
    )
    if check:
        sampling = replace(sampling, greedy=True)  # a test, which should repeat
    if logprobs is not None and not as_json:
        raise RequestError("--logprobs are part of what --json prints: add it")
    messages = _messages(_prompt_text(prompt), system=system, raw=raw)
    if check and not no_speculation:
        check_comparable(config.verify, sampling.over(SamplingParams()))
    if trace is not None:
        check_writable(trace)  # now, not after minutes of work
    checks.check_files(config, options.plan)
    renderer = Renderer(as_json=as_json, quiet=quiet, check=check)
    with _traced(trace, config, renderer.note) as timeline, renderer:
        from offspec.engine.load import load  # imports torch: after every check of the options

        with (
            load(config, plan=options.plan, at_once=True, notify=renderer.show, timeline=timeline) as engine,
            closing(  # a stream left before its end must be idle before the engine is closed
                engine.stream(
                    messages,
                    sampling.over(engine.sampling_defaults),
                    raw=raw,
                    speculate=not no_speculation,
                    check=check,
                )
            ) as events,
        ):
            for event in events:
                renderer.show(event)
    if renderer.mismatched:
        raise OffspecError(
            "speculation changed the answer, which is a bug in offspec; please report the model, the prompt, "
            "the options, and the line that begins with check: above"
        )


def _format(json_schema: Path | None, regex: str | None, open_schemas: bool) -> Constraint | None:
    """The format that options ask for. Raises RequestError."""
    if json_schema is not None and regex is not None:
        raise RequestError("an answer has one format: leave out --json-schema or --regex")
    if regex is not None:
        return Constraint("regex", regex)
    if json_schema is None:
        return None
    try:
        format = Constraint("json_schema", json_schema.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--json-schema {json_schema} cannot be read as text: {error}") from None
    return format if open_schemas else format.closed


def _prompt_text(prompt: str | None) -> str:
    """The prompt from the command line or from standard input. Raises RequestError."""
    if prompt is not None and prompt != "-":
        return prompt
    if sys.stdin is None or (prompt is None and sys.stdin.isatty()):
        raise RequestError("there is no prompt; give one after the model, or pipe it in")
    data = sys.stdin.buffer.read(MOST_INPUT + 1)
    if len(data) > MOST_INPUT:
        raise RequestError(f"standard input has more than {format_bytes(MOST_INPUT)}, which no context holds")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"standard input is not UTF-8 text: byte {error.start} is not part of it"
        ) from None
    return text.removesuffix("\n").removesuffix("\r")


def _messages(text: str, *, system: str | None, raw: bool) -> str | list[dict[str, str]]:
    """What the engine is asked: plain text, or a conversation when there is a system message."""
    if not text or not (raw or text.strip()):
        raise RequestError("the prompt is empty; write what the model should answer")
    if system is None:
        return text
    if raw:
        raise RequestError("--system needs the chat template that --raw switches off; leave out one of them")
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


@contextmanager
def _traced(file: Path | None, config: EngineConfig, say: Callable[[str], None]) -> Iterator[Timeline | None]:
    """A timeline to record into, written to `file` when the block ends; None where there is no file.

    After an error or Ctrl-C in the block what was recorded by then is written, and that error goes on:
    should the file fail as well, that is only said. Where nothing was recorded no file appears.
    """
    if file is None:
        yield None
        return
    timeline = Timeline(on=True)
    try:
        yield timeline
    except BaseException:
        if timeline.kept:
            try:
                say(_write_timeline(timeline, file, config))
            except OffspecError as error:
                say(f"the timeline is lost: {error}")
        raise
    say(_write_timeline(timeline, file, config))


def _write_timeline(timeline: Timeline, file: Path, config: EngineConfig) -> str:
    """Write the file; a line for the user about it. Raises DiskFullError, RequestError."""
    settings = {name: value for name, value in asdict(config).items() if value is not None}
    timeline.write(file, {"offspec": __version__, **settings})
    size = format_bytes(file.stat().st_size)
    missing = f", without the last {timeline.dropped} events" if timeline.dropped else ""
    return f"timeline written to {file}, {size}{missing}; open it at https://ui.perfetto.dev"
