"""The whole app over a scripted engine; a coroutine drives it as a user does.

For snapshots everything that moves can be frozen: clocks, animations, the blinking cursor. A pass can be
paused in the middle of its layers.
"""

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual._xterm_parser import XTermParser
from textual.pilot import Pilot
from textual.widgets import Input, TextArea

from offspec.chat.archive import SessionArchive
from offspec.core.config import EngineConfig
from offspec.core.sampling_defaults import SamplingOverrides
from offspec.ui.chat.setup import ChatSetup
from offspec.ui.tui.app import ChatApp
from offspec_planners.placement import Tier
from tests.support.fake_engine import PassGate, Script, ScriptedEngine, ScriptedLoad
from tests.support.waiting import PATIENCE

if TYPE_CHECKING:
    from offspec_planners.plan import Plan

Scene = Callable[["Pilot[None]"], Coroutine[Any, Any, None]]


class PlannedEngine(ScriptedEngine):
    """An engine with the placement of its plan."""

    @property
    def placement(self) -> dict[str, Any]:
        if self.plan is None:
            return super().placement
        held = self.plan.placement
        return {
            **super().placement,
            "resident_layers": len(held.layers(Tier.DEVICE)),
            "cpu_layers": 0,
            "host_layers": len(held.layers(Tier.HOST)),
            "disk_layers": len(held.layers(Tier.DISK)),
            "memory": self.plan.memory,
            "vram": self.plan.vram,
            "gpu_names": [] if self.plan.vram is None else [self.plan.hardware.processor.name],
        }


def app_for(
    answers: Sequence[str | Script],
    folder: Path,
    *,
    plan: "Plan | None" = None,
    model: str = "demo",
    draft: str = "auto",
    passes: int | None = None,
    loads: bool = True,
    memory: int | None = None,
    failing: Sequence[str] = (),
    notify: bool = True,
) -> tuple[ChatApp, PlannedEngine]:
    """Return an app with a scripted engine.

    Args:
        folder: Folder of the conversations.
        passes: Number of passes before one is paused in the middle of its layers.
        loads: False to finish loading only after the scene.
        failing: Drafts that cannot be loaded.
    """
    if plan is None:
        config = EngineConfig(model=model, draft=draft, memory=memory)
        engine = PlannedEngine(answers, config=config)
    else:
        config = EngineConfig(model=model, draft=draft, budget=plan.budget, width=plan.width)
        layers, context = len(plan.placement.tiers), plan.context
        engine = PlannedEngine(answers, layers=layers, context=context, plan=plan, config=config)
    if passes is not None:
        engine.gate = PassGate(passes)
    opener = ScriptedLoad(engine, failing=failing)
    if not loads:
        opener.gate.clear()
    setup = ChatSetup(config, SamplingOverrides({"max_tokens": 2048, "temperature": 0.5}), notify=notify)
    app = ChatApp(setup, opener, SessionArchive(folder))
    app.animation_level = "none"
    return app, engine


async def until(pilot: Pilot[None], holds: Callable[[], bool]) -> None:
    """Wait until the condition holds."""
    async with asyncio.timeout(PATIENCE):
        while not holds():
            await pilot.pause(0.02)
    await pilot.pause()


async def loaded(pilot: Pilot[None]) -> ChatApp:
    """Wait until the model is loaded; then freeze the clock."""
    app = pilot.app
    assert isinstance(app, ChatApp)
    await until(pilot, lambda: app.controller is not None and not app.is_loading)
    assert app.controller is not None
    app.controller.stats.clock = lambda: 0.0
    return app


async def ask(pilot: Pilot[None], *questions: str) -> ChatApp:
    """Ask questions and wait for their whole answers."""
    app = await loaded(pilot)
    assert app.controller is not None
    for question in questions:
        turns = app.controller.session.conversation.turns + 1
        app.composer.text = question
        await pilot.press("enter")
        await until(pilot, functools.partial(answered, app, turns))
    await settled(pilot)
    return app


def answered(app: ChatApp, turns: int) -> bool:
    """Return whether this many questions were asked and the last one is answered."""
    assert app.controller is not None
    session = app.controller.session
    return session.conversation.turns == turns and not session.busy and app.answer is None


async def caught_up(pilot: Pilot[None]) -> None:
    """Wait until the current answer, the status and the statistics are painted."""
    app = pilot.app
    assert isinstance(app, ChatApp)
    ticks = app._ticks

    def painted() -> bool:
        answer = app.answer
        if answer is None or answer._fresh.is_set() or answer._painting.locked():
            return False
        return app._ticks > ticks and not app._passed

    await until(pilot, painted)
    app.composer.cursor_blink = False
    await pilot.pause()


async def settled(pilot: Pilot[None]) -> None:
    """Wait until everything is painted, and show the cursor permanently."""
    await until(pilot, lambda: all(worker.is_finished for worker in pilot.app.workers))
    for area in pilot.app.screen.query(TextArea):
        area.cursor_blink = False
    for field in pilot.app.screen.query(Input):
        field.cursor_blink = False
    await pilot.wait_for_scheduled_animations()
    await pilot.pause()


def play(app: ChatApp, scene: Scene, size: tuple[int, int] = (80, 24)) -> ChatApp:
    """Run the scene, and close the app as a user does."""

    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            await scene(pilot)
            app.exit()

    asyncio.run(run())
    if isinstance(app.opener, ScriptedLoad):
        app.opener.gate.set()
    assert app.engine is not None
    assert app.engine.close(PATIENCE)
    return app


def plays(
    *answers: str | Script, size: tuple[int, int] = (80, 24), **settings: Any
) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Run a test as a scene of the app that `app_for` makes with these answers and settings.

    The test gets its fixtures, and those of `pilot`, `app` and `engine` that it names.
    """

    def decorate(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        wanted = inspect.signature(test).parameters
        cast = {name for name in ("pilot", "app", "engine") if name in wanted}
        fixtures = dict.fromkeys(["tmp_path", *(name for name in wanted if name not in cast)])

        @functools.wraps(test)
        def run(tmp_path: Path, **given: Any) -> None:
            app, engine = app_for(answers, tmp_path, **settings)
            if "tmp_path" in wanted:
                given["tmp_path"] = tmp_path

            async def scene(pilot: Pilot[None]) -> None:
                there = {"pilot": pilot, "app": app, "engine": engine}
                await test(**{name: there[name] for name in cast}, **given)

            play(app, scene, size)

        by_name = inspect.Parameter.KEYWORD_ONLY
        signature = inspect.Signature([inspect.Parameter(name, by_name) for name in fixtures])
        vars(run)["__signature__"] = signature
        return run

    return decorate


async def send(pilot: Pilot[None], text: str) -> None:
    """Type into the composer, and press Enter."""
    app = pilot.app
    assert isinstance(app, ChatApp)
    app.composer.set_text(text)
    await pilot.press("enter")


def type_as_terminal(pilot: Pilot[None], sent: str) -> None:
    """Post the events that the terminal driver makes of these characters."""
    for message in XTermParser().feed(sent):
        message.set_sender(pilot.app)
        pilot.app.post_message(message)


def seen(app: ChatApp) -> str:
    """Return the lines that the terminal shows."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)


def said(app: ChatApp) -> list[tuple[str, str]]:
    """All entries of the transcript: kind and text."""
    kinds = {True: "question", False: "answer"}
    return [(entry.kind or kinds[entry.is_question], entry.text) for entry in app.transcript.entries]


async def until_seen(pilot: Pilot[None], text: str, *, there: bool = True) -> None:
    """Wait until the terminal shows this text, or no longer shows it."""
    app = pilot.app
    assert isinstance(app, ChatApp)
    await until(pilot, lambda: (text in seen(app)) == there)


async def hold(pilot: Pilot[None], engine: PlannedEngine, text: str) -> None:
    """Send a question, and wait until its answer is paused in the middle of a pass."""
    await loaded(pilot)
    await send(pilot, text)
    await until(pilot, engine.at_gate.is_set)
