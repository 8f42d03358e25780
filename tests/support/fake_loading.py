"""An engine that follows a script, so that the command line can be tested without a model.

In a test, `install(script)` takes the place of `offspec.engine.engine`. As a program,
`python tests/support/fake_loading.py SCRIPT ARGS…` is `offspec ARGS…` with that engine.
"""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from offspec.core.config import EngineConfig, SamplingParams
from offspec.core.errors import CapacityError, ModelNotFoundError, StreamError
from offspec.core.events import (
    Event,
    Finished,
    LoadProgress,
    Mismatch,
    Notice,
    PassStats,
    Prefill,
    Result,
    TextDelta,
)
from offspec.core.trace import OFF, Timeline

PIECES = ("The sky", " is", " blue [really].")
TEXT = "".join(PIECES)
Notify = Callable[[Event], None]


@dataclass
class Script:
    """What the engine does, and what was asked of it."""

    name: str = "answer"
    seed: int = 7
    mismatches: tuple[Mismatch, ...] = ()
    loaded: dict[str, Any] = field(default_factory=dict)
    asked: dict[str, Any] = field(default_factory=dict)
    closed: list[str] = field(default_factory=list)
    timeline: Timeline | None = None

    def note(self, what: str) -> None:
        self.closed.append(what)
        print(f"[{what} closed]", file=sys.stderr, flush=True)


class ScriptedEngine:
    def __init__(self, script: Script, timeline: Timeline) -> None:
        self.script, self.timeline = script, timeline

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.script.note("engine")

    def stream(self, prompt: Any, params: SamplingParams, **asked: Any) -> Iterator[Event]:
        self.script.asked = {"prompt": prompt, "params": params, **asked}
        try:
            with self.timeline.span("prefill", "prompt", tokens=12):
                yield Prefill(tokens=12, reused=3, layer=0, layers=30)
                yield Prefill(tokens=12, reused=3, layer=30, layers=30)
            if self.script.name == "endless":
                yield from self._endless()
            if self.script.name == "broken-disk":
                yield TextDelta("The", (1,))
                raise StreamError("read failed: Input/output error", file="model.safetensors", offset=4096)
            if self.script.name == "bug":
                raise ZeroDivisionError("an honest bug")
            yield from self._answer(check=bool(asked["check"]))
        finally:
            self.script.note("stream")

    def _endless(self) -> Iterator[Event]:
        print("[answering]", file=sys.stderr, flush=True)
        for index in range(10**9):
            yield TextDelta(f"line {index}\n", (index,))
            yield PassStats(index, 256, 12, 12, 1, 0.1, 0.2, 10**9)
            time.sleep(0.01)

    def _answer(self, *, check: bool) -> Iterator[Event]:
        if self.script.name == "nothing":
            yield Finished(self._result(text="", token_ids=(), passes=1, finish_reason="eos"))
            return
        for index, piece in enumerate(PIECES):
            yield TextDelta(piece, (2 * index, 2 * index + 1))
            yield PassStats(index, 256, 12, 12, 2, 0.1, 0.2, 10**9)
        mismatches = self.script.mismatches if check else None
        yield Finished(
            self._result(
                text=TEXT, token_ids=tuple(range(6)), passes=3, finish_reason="length", mismatches=mismatches
            )
        )

    def _result(self, **given: Any) -> Result:
        return Result(
            seconds=2.0,
            ttft_s=0.5,
            bytes_streamed=3 * 10**9,
            peak_memory_bytes=1_200_000_000,
            draft="substitute (4-bit)",
            budget=256,
            seed=self.script.seed,
            **given,
        )


def load(
    script: Script,
    config: EngineConfig,
    *,
    plan: Path | None = None,
    notify: Notify | None = None,
    timeline: Timeline | None = None,
) -> ScriptedEngine:
    script.loaded, script.timeline = {**asdict(config), "plan": plan}, timeline
    model = config.model
    if model == "missing/model":
        raise ModelNotFoundError("no model 'missing/model': neither a folder\nnor a hub id")
    if model == "too-big":
        raise CapacityError("needs 900 MB, was given 100 MB", needed=900_000_000, given=100_000_000)
    if notify:
        notify(LoadProgress("opening [model]", 1, 2, "files"))
        notify(LoadProgress("unpacking", 10**9, 2 * 10**9))
        notify(Notice("reads are buffered: this file system [tmpfs] has no O_DIRECT"))
    if script.name == "slow-load":
        try:
            print("[loading]", file=sys.stderr, flush=True)
            time.sleep(60)
        finally:
            script.note("load")
    return ScriptedEngine(script, timeline or OFF)


def module(script: Script) -> ModuleType:
    """A stand-in for the module `offspec.engine.engine`."""
    fake = ModuleType("offspec.engine.load")
    vars(fake)["Engine"] = ScriptedEngine
    vars(fake)["load"] = partial(load, script)
    return fake


def main() -> None:
    # A shell that starts us in the background has SIGINT ignored; a test must be able to send one.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.modules["offspec.engine.load"] = module(Script(sys.argv[1]))
    sys.argv[1:] = sys.argv[2:]
    from offspec.ui.cli.main import main as program

    program()


if __name__ == "__main__":
    main()
