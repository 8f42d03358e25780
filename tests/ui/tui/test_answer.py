"""How an answer is painted, and how much work that is."""

import pytest
from markdown_it import MarkdownIt
from textual.pilot import Pilot

from offspec.chat.conversation import Message
from offspec.core.events import Piece
from offspec.ui.tui import transcript_view
from offspec.ui.tui.answer import LEGEND, Answer, by_source
from offspec.ui.tui.app import ChatApp
from offspec.ui.tui.markdown import StreamedMarkdown
from offspec.ui.tui.thinking_block import ThinkingBlock
from offspec.ui.tui.transcript_entries import Question
from tests.ui.tui.stage import PlannedEngine, ask, loaded, plays, said, seen, send, settled, until

PIECES = (Piece("The", "draft"), Piece(" sky", "draft"), Piece(" is", "bonus"), Piece("", "draft"))


async def _answered(pilot: Pilot[None]) -> Answer:
    app = pilot.app
    assert isinstance(app, ChatApp)
    await until(pilot, lambda: app.answer is None and any(not e.is_question for e in app.transcript.entries))
    await settled(pilot)
    return app.transcript.query(Answer).last()


@plays("x")
async def test_a_long_answer_is_not_read_again_for_each_delta(
    pilot: Pilot[None], app: ChatApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The characters that the Markdown parser reads grow with the answer, not with its square."""
    paragraph = "Some words of an answer that has many paragraphs.\n\n"
    read = 0
    parse = MarkdownIt.parse

    def counted(self: MarkdownIt, src: str, env: object = None) -> object:
        nonlocal read
        read += len(src)
        return parse(self, src, env)

    await loaded(pilot)
    answer = await app.transcript.begin_answer()
    monkeypatch.setattr(MarkdownIt, "parse", counted)
    for _ in range(100):
        answer.write(paragraph, ())
        await answer._paint()
    assert answer.query_one(StreamedMarkdown).source == paragraph * 100
    assert read < 4 * 100 * len(paragraph)
    answer.finish()


@plays("x")
async def test_text_that_comes_fast_is_painted_thirty_times_a_second_at_most(
    pilot: Pilot[None], app: ChatApp
) -> None:
    await loaded(pilot)
    answer = await app.transcript.begin_answer()
    for number in range(1000):
        answer.write(f"{number} ", ())
        if number % 100 == 0:
            await pilot.pause()
    answer.finish()
    await settled(pilot)
    assert answer.query_one(StreamedMarkdown).source == "".join(f"{number} " for number in range(1000))
    assert answer.painted < 50


@plays("x", size=(80, 50))
async def test_markdown_is_the_same_whether_it_came_at_once_or_by_the_character(
    pilot: Pilot[None], app: ChatApp
) -> None:
    text = (
        "# Title\n\nWords, *some* leaning.\nA second line.\n\n- one\n- two\n  - deep\n\n1. first\n2. second\n"
        "\n```python\ndef f(x):\n    return x\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n> said\n"
        "\nThe end 世界."
    )

    await loaded(pilot)
    slow = await app.transcript.begin_answer()
    for character in text:
        slow.write(character, ())
        await slow._paint()
    slow.finish()
    await settled(pilot)
    shown = seen(app)
    await app.transcript.remove_entry(app.transcript.entry_of(slow))
    fast = await app.transcript.begin_answer()
    fast.write(text, ())
    fast.finish()
    await settled(pilot)
    assert seen(app) == shown


@plays("<think>\nhm let me see\n</think>\n\nIt is **so**.")
async def test_thinking_is_folded_to_a_line_that_opens(pilot: Pilot[None], app: ChatApp) -> None:
    await ask(pilot, "Why?")
    assert "thinking, 4 words" in seen(app)
    assert "hm let me see" not in seen(app)
    assert "It is so." in seen(app)
    await pilot.press("f2")
    await until(pilot, lambda: "hm let me see" in seen(app))
    await pilot.press("f2")
    await until(pilot, lambda: "hm let me see" not in seen(app))
    await pilot.press("x")
    assert app.composer.text == "x"


@plays("x")
async def test_thinking_that_the_template_opened_is_thinking_from_the_first_word(
    pilot: Pilot[None], app: ChatApp
) -> None:
    await loaded(pilot)
    answer = await app.transcript.begin_answer()
    answer.state.opened = "<think>\n"
    answer.write("let me", ())
    await answer._paint()
    assert answer.query_one(ThinkingBlock).title == "thinking, 2 words …"
    answer.write(" see</think>\n\nSo.", ())
    await answer._paint()
    assert answer.query_one(ThinkingBlock).title == "thinking, 3 words"
    assert answer.query_one(StreamedMarkdown).source == "So."
    answer.finish()


@plays("let me see </think> So.")
async def test_a_thought_that_nobody_opened_is_seen_when_it_closes(pilot: Pilot[None], app: ChatApp) -> None:
    await ask(pilot, "Why?")
    assert "thinking, 3 words" in seen(app)
    assert "let me see" not in seen(app)


@plays("one **two** three four five six", passes=1)
async def test_sources_are_shown_and_hidden_while_it_streams(
    pilot: Pilot[None], app: ChatApp, engine: PlannedEngine
) -> None:
    await loaded(pilot)
    await send(pilot, "Count.")
    await until(pilot, lambda: engine.held.is_set() and "one two three" in seen(app))
    await pilot.press("ctrl+o")
    await until(pilot, lambda: "one **two** three four" in seen(app))
    assert "draft tokens" in seen(app) or "Count" in seen(app)
    engine.gate.set()
    answer = await _answered(pilot)
    assert "one **two** three four five six" in seen(app)
    assert answer.state.pieces[3] == Piece(" four", "bonus")
    await pilot.press("ctrl+o")
    await until(pilot, lambda: "one two three four five six" in seen(app))


@plays("<div>kept</div> and \x1b[31mred [b]plain[/b]")
async def test_what_is_no_markdown_is_shown_as_it_is(pilot: Pilot[None], app: ChatApp) -> None:
    """HTML would vanish, and a terminal would obey an escape sequence."""

    await ask(pilot, "[red]Why[/red] \x1b[2J?")
    assert "<div>kept</div> and �[31mred [b]plain[/b]" in seen(app)
    assert "[red]Why[/red] �[2J?" in seen(app)


@plays("x", size=(100, 20))
async def test_two_hundred_turns_are_a_few_widgets(
    pilot: Pilot[None], app: ChatApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a delta costs does not grow with the conversation: no earlier answer is laid out for it."""
    messages = [
        message
        for turn in range(200)
        for message in (
            Message("user", f"question {turn}"),
            Message("assistant", f"*answer* {turn}\n\n- a\n- b"),
        )
    ]

    await loaded(pilot)
    view = app.transcript
    await view.show(messages)
    assert len(view.entries) == 400
    assert len(view.query(Answer)) + len(view.query(Question)) <= transcript_view.LIVE
    await until(pilot, lambda: view.scroll_y > 0)  # more than a page, one by one
    for turn in range(transcript_view.LIVE):
        await view.ask(f"new {turn}")
        answer = await view.begin_answer()
        answer.write("yes", ())
        answer.finish()
        await pilot.pause()
    assert len(view.query(Answer)) + len(view.query(Question)) <= transcript_view.LIVE
    measured = 0
    measure = StreamedMarkdown.get_content_height

    def counted(self: StreamedMarkdown, *sizes: object) -> int:
        nonlocal measured
        measured += 1
        return measure(self, *sizes)

    answer = await view.begin_answer()
    await pilot.pause()
    monkeypatch.setattr(StreamedMarkdown, "get_content_height", counted)
    for _ in range(20):
        answer.write("word ", ())
        await answer._paint()
        await pilot.pause()
    assert measured <= 20 * transcript_view.LIVE
    answer.finish()


@pytest.mark.exhaustive
@plays("x")
async def test_earlier_turns_come_when_one_scrolls_up(pilot: Pilot[None], app: ChatApp) -> None:
    messages = [
        message
        for turn in range(20)
        for message in (Message("user", f"question {turn}"), Message("assistant", f"answer {turn}"))
    ]

    await loaded(pilot)
    await app.transcript.show(messages)
    await pilot.pause()
    assert "answer 19" in seen(app)
    for _ in range(24):
        await pilot.press("pageup")
    await until(pilot, lambda: "question 0" in seen(app))
    assert "earlier" not in seen(app)
    await pilot.press(*["pagedown"] * 12)
    await until(pilot, lambda: "answer 19" in seen(app))
    assert len(said(app)) == 40


def test_the_text_is_that_of_the_pieces() -> None:
    assert by_source(PIECES).plain == "The sky is"
    assert by_source(()).plain == ""


def test_the_targets_own_tokens_are_underlined_as_well_as_by_source() -> None:
    underlined = [
        by_source(PIECES).plain[span.start : span.end]
        for span in by_source(PIECES).spans
        if "underline" in str(span.style)
    ]
    assert underlined == [" is"]
    assert "underlined" in LEGEND


def test_a_run_of_one_source_is_one_span() -> None:
    assert len(by_source(PIECES).spans) == 2


def test_nothing_in_an_answer_is_markup_or_obeyed_by_a_terminal() -> None:
    hostile = by_source((Piece("[red]x[/red]\x1b[2J\n\ty\x07", "draft"),)).plain
    assert hostile == "[red]x[/red]�[2J\n\ty�"


@plays(" ")
async def test_an_answer_without_text_leaves_a_mark(pilot: Pilot[None], app: ChatApp) -> None:
    await ask(pilot, "Why?")
    await until(pilot, lambda: "an answer without text" in seen(app))
