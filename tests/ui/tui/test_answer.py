"""Painting of an answer, and its cost."""

import pytest
from markdown_it import MarkdownIt
from textual.pilot import Pilot

from offspec.chat.conversation import Message
from offspec.core.events import Piece
from offspec.ui.tui import transcript_view
from offspec.ui.tui.answer import LEGEND, Answer, highlight_sources
from offspec.ui.tui.app import ChatApp
from offspec.ui.tui.markdown import StreamedMarkdown
from offspec.ui.tui.transcript_entries import Question
from tests.ui.tui.stage import PlannedEngine, ask, hold, loaded, plays, seen, settled, until

PIECES = (Piece("The", "draft"), Piece(" sky", "draft"), Piece(" is", "bonus"), Piece("", "draft"))


@plays("x")
async def test_cost_of_painting_a_long_answer(
    pilot: Pilot[None], app: ChatApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most thirty paints a second; parsing work grows linearly with the answer."""
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
    for _ in range(50):
        answer.write(paragraph, ())
        await answer._paint()
    assert answer.query_one(StreamedMarkdown).source == paragraph * 50
    assert read < 4 * 50 * len(paragraph)
    answer.finish()

    answer = await app.transcript.begin_answer()
    for number in range(500):
        answer.write(f"{number} ", ())
        if number % 100 == 0:
            await pilot.pause()
    answer.finish()
    await settled(pilot)
    assert answer.query_one(StreamedMarkdown).source == "".join(f"{number} " for number in range(500))
    assert answer.painted < 50


@plays("one **two** three four five six", passes=1)
async def test_sources_are_shown_and_hidden_while_it_streams(
    pilot: Pilot[None], app: ChatApp, engine: PlannedEngine
) -> None:
    await hold(pilot, engine, "Count.")
    await until(pilot, lambda: "one two three" in seen(app))
    await pilot.press("ctrl+o")
    await until(pilot, lambda: "one **two** three four" in seen(app))
    assert "draft tokens" in seen(app) or "Count" in seen(app)
    engine.gate.set()
    await until(pilot, lambda: app.answer is None)
    await settled(pilot)
    answer = app.transcript.query(Answer).last()
    assert "one **two** three four five six" in seen(app)
    assert answer.state.pieces[3] == Piece(" four", "bonus")
    await pilot.press("ctrl+o")
    await until(pilot, lambda: "one two three four five six" in seen(app))


@plays("<div>kept</div> and \x1b[31mred [b]plain[/b]", " ")
async def test_html_and_escape_sequences_are_shown_literally(pilot: Pilot[None], app: ChatApp) -> None:
    """HTML would vanish, and a terminal would obey an escape sequence."""

    await ask(pilot, "[red]Why[/red] \x1b[2J?")
    assert "<div>kept</div> and �[31mred [b]plain[/b]" in seen(app)
    assert "[red]Why[/red] �[2J?" in seen(app)
    await ask(pilot, "And?")
    await until(pilot, lambda: "empty answer" in seen(app))


@plays("x", size=(100, 20))
async def test_long_conversation_uses_few_widgets(
    pilot: Pilot[None], app: ChatApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cost of a delta does not grow with the conversation: no earlier answer is laid out again."""
    turn = (Message("user", "question"), Message("assistant", "*answer*\n\n- a\n- b"))
    await loaded(pilot)
    view = app.transcript
    await view.show(turn * 200)
    assert len(view.entries) == 400
    await until(pilot, lambda: view.scroll_y > 0)  # more than a page, one by one
    for _ in range(transcript_view.LIVE):
        await view.ask("new")
        answer = await view.begin_answer()
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


def test_pieces_of_one_source_are_merged_into_one_span() -> None:
    by_pieces = highlight_sources(PIECES)
    assert by_pieces.plain == "The sky is" and highlight_sources(()).plain == ""
    assert len(by_pieces.spans) == 2
    underlined = [span for span in by_pieces.spans if "underline" in str(span.style)]
    assert [by_pieces.plain[span.start : span.end] for span in underlined] == [" is"]
    assert "underlined" in LEGEND


def test_answers_cannot_contain_markup_or_terminal_codes() -> None:
    hostile = highlight_sources((Piece("[red]x[/red]\x1b[2J\n\ty\x07", "draft"),)).plain
    assert hostile == "[red]x[/red]�[2J\n\ty�"
