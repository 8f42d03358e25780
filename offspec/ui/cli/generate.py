"""`offspec generate`: answer one prompt."""

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from offspec import __version__
from offspec.core.config import AUTO, NONE, Constraint, EngineConfig, SamplingParams, check_comparable
from offspec.core.errors import OffspecError, RequestError
from offspec.core.trace import Timeline, check_writable
from offspec.ui.cli import checks
from offspec.ui.cli import options as opt
from offspec.ui.cli.line_input import MOST_INPUT
from offspec.ui.cli.render import Renderer
from offspec_planners.units import format_bytes

EPILOG = """[bold]Examples[/]

The demo model in 1 GB of memory:

  offspec generate demo "Why is the sky blue?" --memory 1GB

A large model with a small draft model, sampling, prompt from a pipe:

  cat question.txt | offspec generate ./Qwen3-32B --draft ./Qwen3-0.6B --temperature 0.7 --seed 1

Two draft sources: a trained head, and suffix lookup, which suits edits of a given text:

  cat letter.txt | offspec generate ./Qwen3-32B --draft AngelSlim/Qwen3-32B_eagle3,suffix
"""


@opt.takes_options
def generate(
    ctx: typer.Context,
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
    """Answer one prompt. The text is streamed to stdout, everything else goes to stderr.

    Args:
        prompt (PROMPT): The prompt. If omitted or `-`, it is read from standard input, without the final
            newline.

    Speculative decoding:
        no_speculation: Decode one token per pass, without a draft.
        check: Decode again without speculation and compare the tokens. A difference is a bug, and the exit
            code is 1. Ignores the model's sampling defaults.

    Output constraints:
        json_schema (FILE): JSON schema that the answer must match. Output cut off by `--max-tokens` is not
            valid JSON.
        open_schemas: Allow properties that the JSON schema does not name, as in the JSON Schema standard. By
            default they are forbidden unless the schema sets `additionalProperties`.
        regex (REGEX): Regular expression that the whole answer must match.

    Prompt and output:
        system (TEXT): System message before the prompt.
        raw: Continue the prompt as is, without the model's chat template.
        as_json: Print one JSON object with text, token ids and statistics instead of the text.
        logprobs (K): With `--json`: report each token's log-probability, before penalties and temperature,
            and the K most likely tokens with theirs.
        trace (FILE): Write a timeline of reads, copies, layers and draft steps for https://ui.perfetto.dev;
            compressed if the name ends in .gz.
        quiet: Suppress progress, notices and statistics on stderr.
    """
    if no_speculation and opt.is_typed(ctx, "draft") and options.values["draft"] not in (AUTO, NONE):
        raise RequestError("--no-speculation uses no draft: omit --draft or --no-speculation")
    if no_speculation:  # an unused draft need not be loaded
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
        sampling = replace(sampling, greedy=True)  # a check must be repeatable
    if logprobs is not None and not as_json:
        raise RequestError("--logprobs needs --json: only JSON output has log-probabilities")
    messages = _messages(_prompt_text(prompt), system=system, raw=raw)
    if check and not no_speculation:
        check_comparable(config.verify, sampling.apply_to(SamplingParams()))
    if trace is not None:
        check_writable(trace)  # fail before minutes of work
    checks.check_files(config, options.plan)
    renderer = Renderer(as_json=as_json, quiet=quiet, check=check)
    with _recording_timeline(trace, config, renderer.note) as timeline, renderer:
        from offspec.engine.load import load  # imports torch: after every check of the options

        with (
            load(config, plan=options.plan, at_once=True, notify=renderer.show, timeline=timeline) as engine,
            closing(  # an unfinished stream must be idle before the engine is closed
                engine.stream(
                    messages,
                    sampling.apply_to(engine.sampling_defaults),
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
            "the options, and the line above that begins with check:"
        )


def _format(json_schema: Path | None, regex: str | None, open_schemas: bool) -> Constraint | None:
    """Return the format that the options set, or None. Raises RequestError."""
    if json_schema is not None and regex is not None:
        raise RequestError("--json-schema and --regex exclude each other: omit one")
    if regex is not None:
        return Constraint("regex", regex)
    if json_schema is None:
        return None
    try:
        format = Constraint("json_schema", json_schema.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"cannot read --json-schema {json_schema}: {reason}") from None
    from offspec.sampling.grammar import check_format

    format = format if open_schemas else format.closed
    check_format(format)  # before minutes of loading
    return format


def _prompt_text(prompt: str | None) -> str:
    """Return the prompt from the command line or from standard input. Raises RequestError."""
    if prompt is not None and prompt != "-":
        return prompt
    if sys.stdin is None or (prompt is None and sys.stdin.isatty()):
        raise RequestError("no prompt given; write one after the model, or pipe it in")
    data = sys.stdin.buffer.read(MOST_INPUT + 1)
    if len(data) > MOST_INPUT:
        raise RequestError(
            f"standard input has more than {format_bytes(MOST_INPUT)}, more than any context holds"
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8 text: byte {error.start} is invalid") from None
    return text.removesuffix("\n").removesuffix("\r")


def _messages(text: str, *, system: str | None, raw: bool) -> str | list[dict[str, str]]:
    """Return the engine's input: plain text, or a conversation if there is a system message."""
    if not text or not (raw or text.strip()):
        raise RequestError("the prompt is empty; write what the model should answer")
    if system is None:
        return text
    if raw:
        raise RequestError("--system needs the chat template, which --raw disables; omit one of them")
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


@contextmanager
def _recording_timeline(
    file: Path | None, config: EngineConfig, note: Callable[[str], None]
) -> Iterator[Timeline | None]:
    """Provide a timeline to record into, and write it to `file` at the end; None without a file.

    After an error or Ctrl-C in the block, the events recorded so far are written and the error is raised
    again; if writing fails as well, `note` reports it. Without events no file is written.
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
                note(_write_timeline(timeline, file, config))
            except OffspecError as error:
                note(f"the timeline is lost: {error}")
        raise
    note(_write_timeline(timeline, file, config))


def _write_timeline(timeline: Timeline, file: Path, config: EngineConfig) -> str:
    """Write the file and return a notice for the user. Raises DiskFullError, RequestError."""
    settings = {name: value for name, value in asdict(config).items() if value is not None}
    timeline.write(file, {"offspec": __version__, **settings})
    size = format_bytes(file.stat().st_size)
    missing = f", without the last {timeline.dropped} events" if timeline.dropped else ""
    return f"timeline written to {file}, {size}{missing}; open it at https://ui.perfetto.dev"
