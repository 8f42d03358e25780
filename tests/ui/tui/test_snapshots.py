"""Snapshots of the chat. After an intended change: `pytest tests/ui/tui/test_snapshots.py --snapshot-update`.

The report snapshot_report.html shows each difference.
"""

import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from textual.pilot import Pilot

from offspec.chat.archive import SessionArchive
from offspec.chat.conversation import Conversation, Message
from offspec.core.events import LoadProgress
from offspec.ui.tui.app import ChatApp
from offspec.ui.tui.status import LoadingView
from tests.support.fake_engine import Script, ScriptedLoad
from tests.support.sample_plans import small
from tests.support.waiting import PATIENCE
from tests.ui.tui import stage

Shoot = Callable[..., bool]

QUESTION = "Why is the sky blue?"
ANSWER = """<think>
Rayleigh.
</think>

Air scatters **short** wavelengths most:

- blue reaches you from everywhere, 青い空 🌍;
- red goes straight on.

```python
ratio = (650 / 450) ** 4
```
"""
FULL, MEDIUM, TINY = (110, 38), (80, 24), (40, 12)


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A terminal without identification, in UTC."""
    for name in ("NO_COLOR", "OFFSPEC_THEME", "COLORFGBG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def shoot(snap_compare: Callable[..., bool]) -> Shoot:
    """Compares a screenshot after a scene with the saved snapshot. taken: called after the screenshot."""

    def compare(
        app: ChatApp,
        scene: Callable[[Pilot[None]], Awaitable[object]],
        size: tuple[int, int] = FULL,
        taken: Callable[[], None] = lambda: None,
    ) -> bool:
        try:
            return snap_compare(app, terminal_size=size, run_before=scene)
        finally:
            taken()
            assert app.engine is not None and app.engine.close(PATIENCE)

    return compare


async def conversation(pilot: Pilot[None]) -> ChatApp:
    return await stage.ask(pilot, QUESTION, "And at sunset?")


def talk(folder: Path) -> ChatApp:
    return stage.app_for([ANSWER, "Then it is *red*."], folder, plan=small())[0]


def test_first_frame(shoot: Shoot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class StillLoadingView(LoadingView):
        def __init__(self, model: str) -> None:
            super().__init__(model, clock=lambda: 0.0)

    monkeypatch.setattr("offspec.ui.tui.app.LoadingView", StillLoadingView)
    app = stage.app_for([ANSWER], tmp_path, plan=small(), loads=False)[0]
    opener = app.opener
    assert isinstance(opener, ScriptedLoad)
    opener.progress = [LoadProgress("reading the model", 3 * 10**9, 4 * 10**9)]

    async def scene(pilot: Pilot[None]) -> None:
        view = app.query_one(LoadingView)
        await stage.until(pilot, lambda: "75%" in str(view.visual))
        await pilot.press(*"Why")
        await stage.settled(pilot)

    assert shoot(app, scene, MEDIUM, opener.gate.set)


def test_conversation(shoot: Shoot, tmp_path: Path) -> None:
    assert shoot(talk(tmp_path), conversation)


def test_answer_in_progress(shoot: Shoot, tmp_path: Path) -> None:
    app, engine = stage.app_for([ANSWER], tmp_path, plan=small(), passes=3)

    async def scene(pilot: Pilot[None]) -> None:
        await stage.loaded(pilot)
        app.composer.text = QUESTION
        await pilot.press("enter")
        await stage.until(pilot, lambda: engine.at_gate.is_set() and app.answer is not None)
        await stage.caught_up(pilot)

    assert shoot(app, scene)


def test_error_during_an_answer(shoot: Shoot, tmp_path: Path) -> None:
    app, _ = stage.app_for([Script(ANSWER, fail_after=3)], tmp_path)
    assert shoot(app, lambda pilot: stage.ask(pilot, QUESTION), MEDIUM)


def test_tree(shoot: Shoot, tmp_path: Path) -> None:
    async def scene(pilot: Pilot[None]) -> None:
        await stage.ask(pilot, QUESTION)
        await pilot.press("ctrl+t", "left")
        await stage.settled(pilot)

    assert shoot(talk(tmp_path), scene, MEDIUM)


@pytest.mark.parametrize("view", ["help", "plan", "stats"])
def test_pages(shoot: Shoot, tmp_path: Path, view: str) -> None:
    app = talk(tmp_path)

    async def scene(pilot: Pilot[None]) -> None:
        await conversation(pilot)
        await app.action_command(f"/{view}")
        await stage.settled(pilot)

    assert shoot(app, scene)


def test_saved_conversations(shoot: Shoot, tmp_path: Path) -> None:
    archive, app = SessionArchive(tmp_path), talk(tmp_path)
    for day, title in enumerate(("Rivers", "A holiday in [Rome]", "空 and sky"), 1):
        said = Conversation(
            model="demo",
            id=f"2026010{day}-120000-abcdef",
            title=title,
            created=f"2026-01-0{day}T12:00:00Z",
            updated=f"2026-01-0{day}T12:34:56Z",
            messages=[Message("user", "Question"), Message("assistant", "Answer", finish="eos")],
        )
        said.write(archive.file_for(said))

    async def scene(pilot: Pilot[None]) -> None:
        await stage.loaded(pilot)
        await app.action_command("/sessions")
        await stage.settled(pilot)
        await pilot.press("down")
        await stage.settled(pilot)

    assert shoot(app, scene, MEDIUM)


def test_token_sources(shoot: Shoot, tmp_path: Path) -> None:
    async def scene(pilot: Pilot[None]) -> None:
        await conversation(pilot)
        await pilot.press("ctrl+o")
        await stage.settled(pilot)

    assert shoot(talk(tmp_path), scene)


def test_small_terminal(shoot: Shoot, tmp_path: Path) -> None:
    assert shoot(talk(tmp_path), conversation, TINY)


def test_light_theme(shoot: Shoot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFSPEC_THEME", "light")
    assert shoot(talk(tmp_path), conversation)


def test_without_colour(shoot: Shoot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert shoot(talk(tmp_path), conversation)


def test_command_completion(shoot: Shoot, tmp_path: Path) -> None:
    async def scene(pilot: Pilot[None]) -> None:
        await stage.loaded(pilot)
        await pilot.press(*"/s")
        await stage.settled(pilot)

    assert shoot(talk(tmp_path), scene, MEDIUM)
