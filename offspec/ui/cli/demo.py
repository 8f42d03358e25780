"""`offspec demo`: one prompt answered with and without speculation."""

import sys
import threading
import time
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Annotated

import typer

from offspec.checkpoint.open import DEMO, DEMO_WIDE
from offspec.core.config import EngineConfig, SamplingParams
from offspec.core.errors import CapacityError, DiskFullError
from offspec.core.events import (
    Event,
    Finished,
    LoadProgress,
    Notice,
    PassProgress,
    PassStats,
    TextDelta,
    TreeSeen,
    ignore_event,
)
from offspec.ui import interrupt
from offspec.ui.cli import options as opt
from offspec.ui.cli.console import Console
from offspec.ui.cli.demo_summary import CpuLoad, larger_model_line, summary, wrapped
from offspec.ui.cli.demo_view import ProgressState, Run, View, open_view
from offspec.ui.cli.output import LiveLine, StdoutWriter
from offspec.ui.messages import user_message

EPILOG = """[bold]Examples[/]

Measure the gain from speculation on this machine, in about a minute:

  offspec demo

With your own model and prompt, in 4 GB:

  offspec demo "Write a haiku about rain." --model ./Qwen3-1.7B --memory 4GB
"""

# Memory limits: for the wide model, so that all its layers stream and its draft fits; for other models.
_WIDE_MEMORY, _MEMORY = 1_500_000_000, 1_100_000_000
# Two cores compute such a tree about as fast as the layers come from disk. The numbers are fixed so that
# nothing is measured before the text.
_BUDGET, _WIDTH = 32, 4
# The answer without speculation is stopped once it has both, enough to measure its rate.
_ENOUGH_TOKENS, _ENOUGH_SECONDS = 10, 10.0
_BEFORE = (
    "The demo model, widened to 1.9 B parameters, runs in 1.5 GB of memory: its layers are read from disk "
    "in every pass. This takes about a minute."
)


@dataclass(frozen=True, slots=True)
class _Case:
    """Settings of both answers."""

    prompt: str
    params: SamplingParams
    trees: bool  # whether to show trees
    grows: bool  # whether to raise a memory limit that is too small
    noted: set[str] = field(default_factory=set)  # notices shown; the second run repeats some


@opt.takes_options
def demo(
    prompt: Annotated[str, typer.Argument()] = "Explain in a few sentences why the sky is blue.",
    model: Annotated[str, typer.Option()] = DEMO_WIDE,
    memory: int | None = None,
    max_tokens: int = 96,
) -> None:
    """Compare the speed of one prompt with and without speculation.

    Both answers have the same memory limit; a model that does not fit is
    streamed from disk. Without speculation only the first tokens are
    generated, at least ten, to measure the rate. The speed of a larger
    model is then predicted.

    Args:
        prompt (PROMPT): The prompt of both answers.

    Demo:
        model (MODEL): Target model, as for `offspec generate`. `demo-wide` is the demo model widened to 1.9 B
            parameters (3.9 GB in the cache), drafted by the demo model in 4 bits.
        memory: Memory limit of the whole process. Default: 1.5 GB for `demo-wide`, otherwise 1.1 GB or the
            minimum that works.
        max_tokens: Maximum number of tokens of each answer.
    """
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    case = _Case(prompt, SamplingParams(max_tokens=max_tokens), is_terminal, memory is None)
    config = _config(model, memory)
    processors = CpuLoad.measure()
    alone, drafted = Run("one token per pass"), Run("with speculation")
    try:
        with open_view([alone, drafted]) as view:
            if model == DEMO_WIDE:
                view.note(_BEFORE)
            undrafted = replace(config, draft="none", draft_bits=None, budget=1)
            config = replace(config, memory=_answer(alone, undrafted, case, view).memory)
            config = _answer(drafted, config, case, view)
    except DiskFullError as error:
        raise DiskFullError(
            f"{error}; or run `offspec demo --model {DEMO}`, which needs no disk space"
        ) from error
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        interrupt.mark_reported()
        raise
    out = StdoutWriter()
    for line in summary(alone, drafted, config, processors):
        out.write(wrapped(line, out) + "\n")
    live = LiveLine(Console(stderr=True), wanted=sys.stderr is not None and sys.stderr.isatty())
    live.status("planning for a larger model")
    try:
        line = larger_model_line(ignore_event)
    finally:
        live.stop()
    out.write(wrapped(line, out) + "\n")


def _config(model: str, memory: int | None) -> EngineConfig:
    if model == DEMO_WIDE:
        return EngineConfig(
            model,
            draft=DEMO,
            draft_bits=4,
            device="cpu",  # on a GPU the model might fit, and nothing would be streamed
            memory=memory or _WIDE_MEMORY,
            budget=_BUDGET,
            width=_WIDTH,
        )
    return EngineConfig(model, memory=memory or _MEMORY, device="cpu")


def _answer(run: Run, config: EngineConfig, case: _Case, view: View) -> EngineConfig:
    """Stream an answer to the view. Return the configuration with the memory limit that was used."""
    run.work = ProgressState("starting", 0.0)
    view.changed(run, "")
    from offspec.engine.load import load  # imports torch: after every check of the options
    from offspec.plan.choose_device import AS_GIVEN

    def on_event(event: Event) -> None:
        if isinstance(event, LoadProgress):
            run.work = ProgressState.loading(event)
        elif isinstance(event, PassProgress):
            run.work = ProgressState.in_pass(event)
        elif isinstance(event, Notice) and event.text not in case.noted:
            case.noted.add(event.text)
            view.note(user_message(Notice(event.text.replace(AS_GIVEN, ": the demo uses no GPU"))))
        view.changed(run, "")

    try:
        engine = load(config, notify=on_event)
    except CapacityError as error:
        if not case.grows or error.needed <= (config.memory or 0):
            raise
        config = replace(config, memory=int(1.05 * error.needed))
        engine = load(config, notify=on_event)
    halt = threading.Event()
    speculates = config.draft != "none"
    events = engine.stream(case.prompt, case.params, speculate=speculates, halt=halt, trees=case.trees)
    with engine, closing(events):
        run.began = time.monotonic()
        for event in events:
            _show(run, event, view)
            if not speculates and run.tokens >= _ENOUGH_TOKENS and run.seconds >= _ENOUGH_SECONDS:
                halt.set()
    run.work = None
    view.changed(run, "")
    return config


def _show(run: Run, event: Event, view: View) -> None:
    match event:
        case TextDelta():
            run.text += event.text
            run.tokens += len(event.token_ids)
            view.changed(run, event.text)
        case TreeSeen() if len(event.parent) > 1:
            run.tree = event
        case PassStats():
            run.passes.append(event)
        case Finished():
            run.result = event.result
