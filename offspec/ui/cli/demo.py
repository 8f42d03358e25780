"""`offspec demo`: one prompt answered without speculation and with it."""

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
    unheard,
)
from offspec.ui import interrupt
from offspec.ui.cli import options as opt
from offspec.ui.cli.console import Console
from offspec.ui.cli.demo_summary import Processors, larger, summary, wrapped
from offspec.ui.cli.demo_view import Run, View, Work, open_view
from offspec.ui.cli.output import Live, Output
from offspec.ui.told import told

EPILOG = """[bold]Examples[/]

What speculation gains on this machine, in about a minute:

  offspec demo

With a model and a prompt of your own, in 4 GB:

  offspec demo "Write a haiku about rain." --model ./Qwen3-1.7B --memory 4GB
"""

# A limit under which all layers of the wide model stream, with room for its draft; one for other models.
_WIDE_MEMORY, _MEMORY = 1_500_000_000, 1_100_000_000
# A tree that two cores compute about as fast as the layers come from disk: given, so that nothing has to be
# measured before the text.
_BUDGET, _WIDTH = 32, 4
# The answer without speculation is stopped when it has both: its rate is known by then.
_ENOUGH_TOKENS, _ENOUGH_SECONDS = 10, 10.0
_BEFORE = (
    "The demo model, widened to 1.9 B parameters, answers in 1.5 GB of memory: its layers are read from disk "
    "in each pass. This takes about a minute."
)


@dataclass(frozen=True, slots=True)
class _Case:
    """How the two answers are made."""

    prompt: str
    params: SamplingParams
    trees: bool  # to show
    grows: bool  # the memory limit, if it is too small
    noted: set[str] = field(default_factory=set)  # notices so far: the second run repeats some


@opt.takes_options
def demo(
    prompt: Annotated[str, typer.Argument()] = "Explain in a few sentences why the sky is blue.",
    model: Annotated[str, typer.Option()] = DEMO_WIDE,
    memory: int | None = None,
    max_tokens: int = 96,
) -> None:
    """Answer a prompt without speculation and with it, and compare; then look at a larger model.

    Both answers have the same memory limit, and the model is streamed from disk
    if it does not fit. Without speculation only the first tokens are
    generated, ten or more, to measure the rate. For the larger model
    the speed is predicted.

    Args:
        prompt (PROMPT): The question, asked both times.

    Demo:
        model (MODEL): The target, as `offspec generate` takes it. `demo-wide` is the small demo model widened
            to 1.9 B parameters (3.9 GB, written to the cache on first use), with the small one in 4 bits as
            its draft.
        memory: Memory limit of the whole process. Without it: 1.5 GB for `demo-wide`, else 1.1 GB or the
            least that works.
        max_tokens: Maximum number of tokens of each answer.
    """
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    case = _Case(prompt, SamplingParams(max_tokens=max_tokens), is_terminal, memory is None)
    config = _config(model, memory)
    processors = Processors.now()
    alone, drafted = Run("one token per pass"), Run("with speculation")
    try:
        with open_view([alone, drafted]) as view:
            if model == DEMO_WIDE:
                view.note(_BEFORE)
            undrafted = replace(config, draft="none", draft_bits=None, budget=1)
            config = replace(config, memory=_answer(alone, undrafted, case, view).memory)
            config = _answer(drafted, config, case, view)
    except DiskFullError as error:
        raise DiskFullError(f"{error}; or run `offspec demo --model {DEMO}`, which needs no room") from error
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        interrupt.was_said()
        raise
    out = Output()
    for line in summary(alone, drafted, config, processors):
        out.write(wrapped(line, out) + "\n")
    live = Live(Console(stderr=True), wanted=sys.stderr is not None and sys.stderr.isatty())
    live.status("planning for a larger model")
    try:
        line = larger(unheard)
    finally:
        live.stop()
    out.write(wrapped(line, out) + "\n")


def _config(model: str, memory: int | None) -> EngineConfig:
    if model == DEMO_WIDE:
        return EngineConfig(
            model,
            draft=DEMO,
            draft_bits=4,
            device="cpu",  # a GPU might hold all of it, and nothing would stream
            memory=memory or _WIDE_MEMORY,
            budget=_BUDGET,
            width=_WIDTH,
        )
    return EngineConfig(model, memory=memory or _MEMORY, device="cpu")


def _answer(run: Run, config: EngineConfig, case: _Case, view: View) -> EngineConfig:
    """Stream an answer to the view; the configuration, with the memory that it took."""
    run.work = Work("starting", 0.0)
    view.changed(run, "")
    from offspec.engine.load import load  # imports torch: after every check of the options
    from offspec.plan.choose_device import AS_GIVEN

    def hear(event: Event) -> None:
        if isinstance(event, LoadProgress):
            run.work = Work.loading(event)
        elif isinstance(event, PassProgress):
            run.work = Work.in_pass(event)
        elif isinstance(event, Notice) and event.text not in case.noted:
            case.noted.add(event.text)
            view.note(told(Notice(event.text.replace(AS_GIVEN, ": the demo uses no GPU"))))
        view.changed(run, "")

    try:
        engine = load(config, notify=hear)
    except CapacityError as error:
        if not case.grows or error.needed <= (config.memory or 0):
            raise
        config = replace(config, memory=int(1.05 * error.needed))
        engine = load(config, notify=hear)
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
