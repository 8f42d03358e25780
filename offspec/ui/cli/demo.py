"""`offspec demo`: one prompt answered without speculation and with it, side by side."""

import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Protocol, Self

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from offspec.core.config import EngineConfig, SamplingParams, format_bytes, parse_bytes
from offspec.core.errors import CapacityError, OffspecError
from offspec.core.events import Event, Finished, LoadProgress, Notice, Result, TextDelta, unheard
from offspec.ui.cli.console import Console
from offspec.ui.cli.output import Output, open_live
from offspec.ui.printable import printable
from offspec.ui.told import told

EPILOG = """[bold]Examples[/]

What speculation is worth on this machine:

  offspec demo

With a model and a prompt of your own, in 4 GB:

  offspec demo "Write a haiku about rain." --model ./Qwen3-1.7B --memory 4GB
"""

_MEMORY = 1_100_000_000  # so little that the built-in model streams, with room for its draft
_NARROWEST = 60  # columns of a terminal that two texts have room in
_DRAFT = "Qwen/Qwen3-0.6B"
_LARGER = {"Qwen/Qwen3-8B": 16.4e9, "Qwen/Qwen3-14B": 29.5e9, "Qwen/Qwen3-32B": 65.5e9}  # bytes

_option = partial(typer.Option, rich_help_panel="Demo")

Prompt = Annotated[str, typer.Argument(metavar="PROMPT", help="What is asked, both times.")]
Model = Annotated[str, _option(metavar="MODEL", help="The target, as [bold]offspec generate[/] takes it.")]
Memory = Annotated[
    int | None,
    _option(
        parser=parse_bytes,
        metavar="SIZE",
        help="Memory limit of the whole process. Without it: 1.1 GB, or the least that does.",
        show_default=False,
    ),
]
MaxTokens = Annotated[int, _option(metavar="N", help="Tokens of each answer, at most.")]


@dataclass
class Run:
    """One of the two answers, as far as it is. state: what is done before there is text."""

    title: str
    draft: str
    text: str = ""
    state: str = ""
    tokens: int = 0
    began: float = 0.0
    result: Result | None = None

    @property
    def speed(self) -> float:
        """Tokens per second, so far."""
        if self.result is not None:
            return self.result.tok_per_s
        return self.tokens / max(time.monotonic() - self.began, 1e-9) if self.tokens else 0.0


class View(Protocol):
    """Shows two runs as they come; as a context manager it leaves the terminal as it was."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def changed(self, run: Run, text: str) -> None: ...
    def note(self, text: str) -> None: ...


def demo(
    prompt: Prompt = "Explain in a few sentences why the sky is blue.",
    model: Model = "demo",
    memory: Memory = None,
    max_tokens: MaxTokens = 96,
) -> None:
    """Answer a prompt without speculation and with it, and compare; then look at a larger model.

    Both runs have the same memory limit, and the model streams from disk
    where it does not fit. For the larger model the speed is predicted.
    """
    params = SamplingParams(max_tokens=max_tokens)
    config = EngineConfig(model, memory=memory or _MEMORY, device="cpu")  # what streams under a limit of RAM
    alone, drafted = Run("one token per pass", "none"), Run("with speculation", "auto")
    with _view([alone, drafted]) as view:
        for run in (alone, drafted):
            config = _answer(run, replace(config, draft=run.draft), prompt, params, view, memory is None)
    out = Output()
    for line in _summary(alone, drafted, config):
        out.write(line + "\n")
    live = open_live(Console(stderr=True), wanted=sys.stderr is not None and sys.stderr.isatty())
    live.status("planning for a larger model")
    try:
        line = _larger(unheard)
    finally:
        live.stop()
    out.write(line + "\n")


def _answer(
    run: Run, config: EngineConfig, prompt: str, params: SamplingParams, view: View, grows: bool
) -> EngineConfig:
    """Have a run's answer streamed to the view; the configuration, with the memory that it took.

    grows: whether a limit that is too small is raised.
    """
    run.state = "starting"
    from offspec.engine.load import load  # imports torch: after every check of the options

    def hear(event: Event) -> None:
        if isinstance(event, LoadProgress):
            run.state = event.stage
            view.changed(run, "")
        elif isinstance(event, Notice):
            view.note(told(event))

    try:
        engine = load(config, notify=hear)
    except CapacityError as error:
        if not grows or error.needed <= (config.memory or 0):
            raise
        config = replace(config, memory=int(1.05 * error.needed))
        engine = load(config, notify=hear)
    with engine, closing(engine.stream(prompt, params, speculate=run.draft != "none")) as events:
        run.began = time.monotonic()
        for event in events:
            if isinstance(event, TextDelta):
                run.text += event.text
                run.tokens += len(event.token_ids)
                view.changed(run, event.text)
            elif isinstance(event, Finished):
                run.result = event.result
    view.changed(run, "")
    return config


def _summary(alone: Run, drafted: Run, config: EngineConfig) -> list[str]:
    """The two speeds, and what they were measured on."""
    first, second = alone.result, drafted.result
    assert first is not None and second is not None
    same = "the same text" if first.text == second.text else "texts that differ in their rounding"
    read = max(result.bytes_read / result.passes for result in (first, second))
    moved = max(result.bytes_streamed / result.passes for result in (first, second))
    streamed = f"{format_bytes(int(read or moved))} from {'disk' if read else 'RAM'} in each pass"
    streamed = streamed if moved else "all of the model in memory"
    return [
        "",
        *(
            f"{run.title:<20}{run.result.tok_per_s:7.2f} tokens per second, "
            f"{run.result.tokens_per_pass:.1f} in each of {run.result.passes} passes"
            for run in (alone, drafted)
            if run.result is not None
        ),
        f"{second.tok_per_s / first.tok_per_s:.1f} times the speed, {same}; "
        f"limit {format_bytes(config.memory or 0)}, {streamed}",
    ]


def _larger(notify: Callable[[Event], None]) -> str:
    """A line on a model that does not fit in this machine's memory, by a plan."""
    from offspec.plan.hardware_profile import profile
    from offspec.plan.other_hardware import plan_for_hardware

    try:
        hardware = profile("cpu", notify).hardware
        model = next((name for name, size in _LARGER.items() if size > hardware.ram), list(_LARGER)[-1])
        plan = plan_for_hardware(EngineConfig(model, draft=_DRAFT), hardware)
    except OffspecError as error:
        return f"What a larger model would do here cannot be predicted: {told(error)}"
    fast, slow = plan.forecast.tok_per_s, plan.tok_per_s_alone
    speeds = f"about {fast:.2g} tokens per second, {slow:.2g} without speculation"
    return (
        f"{model} ({_LARGER[model] / 1e9:.0f} GB) on this machine with {hardware.ram / 1e9:.0f} GB of RAM, "
        f"predicted: {speeds}; `offspec plan {model}` says why, and what would help"
    )


def _view(runs: list[Run]) -> View:
    console = Console(highlight=False)
    moves = sys.stdout is not None and sys.stdout.isatty() and not console.is_dumb_terminal
    return Columns(console, runs) if moves and console.width >= _NARROWEST else Lines()


class Columns:
    """Both texts beside each other, drawn again as they grow."""

    def __init__(self, console: Console, runs: list[Run]) -> None:
        self._runs = runs
        self._live = Live(console=console, get_renderable=self._drawn, refresh_per_second=12)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def changed(self, run: Run, text: str) -> None:
        """It is seen at the next refresh."""

    def note(self, text: str) -> None:
        self._live.console.print(Text(printable(text), style="dim"))

    def _drawn(self) -> RenderableType:
        table = Table.grid(padding=(0, 3, 0, 0), expand=True)
        for _ in self._runs:
            table.add_column(ratio=1)
        table.add_row(*map(self._cell, self._runs))
        return Group(Text(), table)

    @staticmethod
    def _cell(run: Run) -> RenderableType:
        speed = f"{run.speed:.1f} tok/s" if run.tokens else run.state
        head = Text.assemble((run.title, "bold"), "  ", (speed, "dim"))
        return Group(head, Text(printable(run.text)))


class Lines:
    """One text after the other, for pipes and narrow terminals."""

    def __init__(self) -> None:
        self._out, self._shown = Output(), ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._out.end_line()

    def changed(self, run: Run, text: str) -> None:
        if text and self._shown != run.title:
            self._out.end_line()
            self._out.write(f"{run.title}:\n")
            self._shown = run.title
        self._out.write(text)

    def note(self, text: str) -> None:
        self._out.end_line()
        typer.echo(printable(text), err=True)
