"""Reasoning blocks: keys, mouse, and the cost of growing."""

from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Static

from offspec.ui.tui.answer import ReasoningBlock
from offspec.ui.tui.app import ChatApp
from tests.ui.tui.stage import ask, loaded, plays, seen, settled, until, until_seen


@plays("<think>\nhm let me see\nonce more\n</think>\n\nIt is **so**.")
async def test_reasoning_is_folded_and_opens_on_click_or_key(pilot: Pilot[None], app: ChatApp) -> None:
    await ask(pilot, "Why?")
    assert "thinking, 6 words" in seen(app) and "It is so." in seen(app)
    assert "hm let me see" not in seen(app)
    await pilot.press("f2")
    await until(pilot, lambda: "hm let me see" in seen(app))
    lines = [line[:60].strip() for line in seen(app).split("\n")]
    assert lines.index("once more") == lines.index("hm let me see") + 1
    for shown in (False, True):
        await pilot.click("ReasoningBlock > .title")
        await until_seen(pilot, "hm let me see", there=shown)
    await pilot.press("shift+tab", "x")
    assert app.composer.text == "x"
    await pilot.press("f2")
    await until(pilot, lambda: "hm let me see" not in seen(app))
    await pilot.press("x")
    assert app.composer.text == "xx"


@plays("x")
async def test_unfolding_during_an_answer_keeps_following(pilot: Pilot[None], app: ChatApp) -> None:
    await loaded(pilot)
    answer = await app.transcript.begin_answer()
    answer.write("<think>\nhm\n</think>\n\n" + "\n\n".join(f"line{n}" for n in range(30)), ())
    await until(pilot, lambda: "line29" in seen(app))
    await pilot.press("f2")
    await pilot.pause(0.1)
    answer.write("\n\nthe end of it", ())
    answer.finish()
    await settled(pilot)
    await until(pilot, lambda: "the end of it" in seen(app))


@plays("x")
async def test_growing_reasoning_needs_no_layout_and_finished_reasoning_no_work(
    pilot: Pilot[None], app: ChatApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    await loaded(pilot)
    answer = await app.transcript.begin_answer()
    answer.state.template_prefix = "<think>\n"  # by the template
    answer.write("let me", ())
    await answer._paint()
    assert "thinking, 2 words …" in str(answer.query_one(ReasoningBlock).title)
    updates: list[bool] = []
    update = Static.update

    def noted(line: Static, *given: Any, layout: bool = True) -> None:
        if isinstance(line.parent, ReasoningBlock):
            updates.append(layout)
        update(line, *given, layout=layout)

    monkeypatch.setattr(Static, "update", noted)
    answer.write(" see", ())
    await answer._paint()
    assert updates == [False]
    await pilot.pause()
    assert "thinking, 3 words …" in seen(app)
    answer.write(" it</think>\n\nSo", ())
    await answer._paint()
    answer.toggle()
    updates.clear()
    answer.write(" it is.", ())
    await answer._paint()
    assert updates == []
    answer.finish()
