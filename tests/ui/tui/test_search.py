"""Ctrl+F: search in questions and answers."""

from textual.pilot import Pilot
from textual.widgets import Input, Static

from offspec.chat.conversation import Message
from offspec.ui.tui.app import ChatApp
from offspec.ui.tui.markdown import plain_text
from tests.support.fake_engine import PassGate
from tests.ui.tui.stage import PlannedEngine, ask, loaded, plays, seen, send, until

LONG = "\n\n".join(f"line{i}" for i in range(30))
ANSWER = f"""<think>
a hidden needle
</think>

- The **long** `needle` is a
  Needle.

```python
needle = 1
```

{LONG}
"""


async def search(pilot: Pilot[None], *keys: str) -> str:
    """Press these keys in the search, and return its message."""
    await pilot.press(*keys)
    await pilot.pause()
    await pilot.pause()
    return str(pilot.app.query_one("#search-place", Static).visual)


def selected(app: ChatApp) -> str:
    return (app.screen.get_selected_text() or "").strip()


@plays(ANSWER, "No *needles* here.\n\n" + LONG)
async def test_search_steps_through_matches_from_the_latest(pilot: Pilot[None], app: ChatApp) -> None:
    await ask(pilot, "Where is the needle?", "And now?")
    assert await search(pilot, "ctrl+f", *"long needle is  a needle") == "1 of 1"
    assert " ".join(selected(app).split()) == "long needle is a Needle"  # across marks and line ends
    assert await search(pilot, "ctrl+a", "ctrl+k", *"[b](") == "nothing found"
    assert selected(app) == ""
    assert await search(pilot, "ctrl+a", "ctrl+k") == ""
    assert await search(pilot, *"hidden") == "nothing found"  # folded reasoning
    await pilot.press("escape")
    await app.transcript.note("a needle of the program", "notice")
    assert await search(pilot, "ctrl+f", *"needle") == "5 of 5"
    assert selected(app) == "needle" and "No needles here." in seen(app)
    assert await search(pilot, "up") == "4 of 5"
    assert selected(app) == "needle" and "needle = 1" in seen(app)
    assert await search(pilot, "enter") == "3 of 5"
    assert selected(app) == "Needle"
    assert await search(pilot, "up", "up") == "1 of 5"
    assert selected(app) == "needle" and "Where is the needle?" in seen(app)
    assert await search(pilot, "up") == "5 of 5"
    assert await search(pilot, "down") == "1 of 5"
    assert await search(pilot, "escape") == "1 of 5"
    assert selected(app) == "" and app.focused is app.composer and "Where is the needle?" in seen(app)
    assert not app.query_one("#search").display
    await pilot.press("x")
    assert app.composer.text == "x"


@plays("one", "two\n\n" + LONG)
async def test_search_during_an_answer(pilot: Pilot[None], app: ChatApp, engine: PlannedEngine) -> None:
    await ask(pilot, "first")
    engine.gate = PassGate(3)
    await send(pilot, "second")
    await until(pilot, lambda: engine.at_gate.is_set())
    assert await search(pilot, "ctrl+f", *"one") == "1 of 1"
    engine.gate.set()
    await until(pilot, lambda: app.answer is None)
    assert selected(app) == "one" and "first" in seen(app)
    assert await search(pilot, "ctrl+a", "ctrl+k", *"line29") == "1 of 1"
    assert "line29" in seen(app)


@plays("ok")
async def test_matches_in_early_turns_of_a_long_conversation(pilot: Pilot[None], app: ChatApp) -> None:
    await loaded(pilot)
    folded = f"{LONG}\n\nfirst needle"
    messages = [Message("user", folded), *(Message("user", f"question {n}") for n in range(20))]
    turns = [said for asked in messages for said in (asked, Message("assistant", "ok 世界 needle"))]
    await app.transcript.show(turns)
    assert await search(pilot, "ctrl+f", *"needle") == "22 of 22"
    assert selected(app) == "needle"
    assert await search(pilot, "down") == "1 of 22"
    assert selected(app) == "needle" and "first needle" in seen(app)  # it was unfolded
    assert await search(pilot, "down") == "2 of 22"
    assert app.focused is app.query_one("#search Input", Input)


def test_plain_text_equals_the_shown_text() -> None:
    markdown = "# A *b*\n\n> `c` <d>\n> e\n\n| f | g |\n|---|---|\n| h | i |\n\n```\n*j*\n```\n"
    assert plain_text(markdown).split("\n") == ["A b", "c <d>", "e", "f", "g", "h", "i", "*j*", ""]
