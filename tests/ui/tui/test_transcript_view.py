"""Transcript entries with an attached widget, and entries out of view without one."""

from itertools import pairwise

import pytest
from textual.pilot import Pilot
from textual.widget import Widget

from offspec.chat.conversation import Message
from offspec.ui.tui.answer import Answer
from offspec.ui.tui.app import ChatApp
from offspec.ui.tui.transcript_entries import Entry, NoteKind, Question
from offspec.ui.tui.transcript_view import TranscriptView
from tests.ui.tui.stage import ask, loaded, plays, said, seen, settled, until

SMALL = (100, 20)
TURNS = [
    message
    for turn in range(30)
    for message in (Message("user", f"question {turn}"), Message("assistant", f"answer {turn}"))
]


def entries_of(view: TranscriptView) -> list[Widget]:
    return [child for child in view.children if child.id not in ("earlier", "welcome")]


async def still(pilot: Pilot[None], view: TranscriptView) -> None:
    """Wait until no more entries arrive and nothing scrolls."""
    seen_at, same = None, 0
    while same < 5:
        await pilot.pause(0.02)
        now = (view.scroll_y, len(view.children), view.virtual_size)
        seen_at, same = now, same + 1 if now == seen_at else 0


@plays("x", size=SMALL)
async def test_current_answer_keeps_its_widget(pilot: Pilot[None], app: ChatApp) -> None:
    await loaded(pilot)
    view = app.transcript
    answer = await view.begin_answer()
    for number in range(24):
        await view.note(f"notice {number}", "notice")
        await pilot.pause()
    assert answer.is_attached
    assert len(entries_of(view)) == 25
    answer.write("it is here", ())
    answer.finish()
    await settled(pilot)
    await view.note("the last", "notice")
    assert not answer.is_attached
    assert len(entries_of(view)) < 20
    for _ in range(12):
        await pilot.press("pageup")
        await pilot.pause()
    await until(pilot, lambda: "it is here" in seen(app))


@plays("x", size=(100, 50))
async def test_view_stays_at_its_position(pilot: Pilot[None], app: ChatApp) -> None:
    await loaded(pilot)
    for number in range(30):
        await app.transcript.note(f"notice {number}", "notice")
        await pilot.pause()
    await until(pilot, lambda: "notice 29" in seen(app))
    shown = [line for line in seen(app).split("\n") if "notice" in line]
    assert len(shown) > 20  # two lines each, with a blank line between


@plays("x", size=SMALL)
async def test_queued_questions_stay_if_the_conversation_is_shown_again(
    pilot: Pilot[None], app: ChatApp
) -> None:
    """All of them: the answer to the first precedes the others."""

    await loaded(pilot)
    view = app.transcript
    waiting = [await view.ask(f"waits {number}", waiting=True) for number in range(20)]
    await view.show(TURNS, waiting)
    await pilot.pause()
    assert all(entry.widget is not None and entry.widget.is_attached for entry in waiting)
    assert len(view.query(Question)) <= 20 + 5
    first = waiting[0]
    view.send(first)
    answer = await view.begin_answer()
    children = list(view.children)
    assert children[children.index(answer) + 1] is waiting[1].widget
    for entry in waiting[1:]:
        await view.remove_entry(entry)
    assert said(app)[-2:] == [("question", "waits 0"), ("answer", "")]
    answer.finish()


@plays("x")
async def test_equal_texts_are_separate_entries(pilot: Pilot[None], app: ChatApp) -> None:
    kind: NoteKind = "notice"
    assert Entry("x", kind) != Entry("x", kind)

    await loaded(pilot)
    view = app.transcript
    first, second = [await view.ask("again", waiting=True) for _ in range(2)]
    await view.remove_entry(second)
    assert view.entries == [first]


@plays("x")
async def test_entries_are_removed_together(
    pilot: Pilot[None], app: ChatApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ask(pilot, "Why?")
    view, removals = app.transcript, []
    remove = view.remove_children

    def counted(widgets: list[Widget]) -> object:
        removals.append(len(widgets))
        return remove(widgets)

    monkeypatch.setattr(view, "remove_children", counted)
    for number in range(5):
        await view.note(f"{number}")
    await view.show(TURNS)
    assert removals == [7]
    await view.remove_messages(TURNS[-4:])
    await until(pilot, lambda: "answer 27" in seen(app))
    assert len(removals) == 2
    assert "answer 28" not in seen(app)


@plays("x", size=SMALL)
async def test_page_up_to_the_beginning_loads_entries(pilot: Pilot[None], app: ChatApp) -> None:
    await loaded(pilot)
    view = app.transcript
    await view.show(TURNS)
    assert len(entries_of(view)) <= 4
    await until(pilot, lambda: view.scroll_y > 10)  # it arrives piece by piece, with its end in view
    assert "answer 29" in seen(app)
    assert len(view.query(Answer)) < 15
    tops = []
    for _ in range(4):
        await pilot.press("pageup")
        await still(pilot, view)
        line = next(line for line in seen(app).split("\n") if "answer" in line)
        tops.append(int(line.split("answer ")[1].split()[0]))
    page = view.size.height / 4  # in turns of four lines each
    steps = [earlier - later for earlier, later in pairwise(tops)]
    assert all(abs(step - page) <= 1 for step in steps), tops
    await pilot.press(*["pageup"] * 12)
    await until(pilot, lambda: "question 0" in seen(app))
    assert "earlier" not in seen(app)
    await pilot.press(*["pagedown"] * 16)
    await until(pilot, lambda: "answer 29" in seen(app))
    assert said(app) == [("answer" if m.role == "assistant" else "question", m.content) for m in TURNS]
