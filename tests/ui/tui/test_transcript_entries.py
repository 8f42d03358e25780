"""Folded questions, and messages of the program: Markdown only from commands."""

from textual.pilot import Pilot

from offspec.ui.tui.app import ChatApp
from offspec.ui.tui.transcript_entries import NoteKind, fold_text
from tests.ui.tui.stage import loaded, plays, seen

HOSTILE = "a*b*c `d` [x](y) [red]e[/red] \x1b[2J"


@plays("x")
async def test_titles_and_paths_in_messages_are_shown_literally(pilot: Pilot[None], app: ChatApp) -> None:
    await loaded(pilot)
    kinds: list[NoteKind] = ["error", "notice", "say"]
    for kind in kinds:
        await app.transcript.note(HOSTILE, kind)
    await pilot.pause()
    as_it_is = "a*b*c `d` [x](y) [red]e[/red] �[2J"
    assert f"error: {as_it_is}" in seen(app) and seen(app).count(as_it_is) == 2
    assert "abc d x" in seen(app)


def test_long_question_is_folded() -> None:
    assert fold_text("short\ntext") == "short\ntext"
    assert fold_text("\n".join(map(str, range(9)))).startswith(
        "0\n1\n2\n3\n4\n5\n6\n7\n⋯ 9 lines, 17 characters"
    )
    one_line = fold_text("x" * 50_000)
    assert len(one_line) < 1200
    assert "1 lines" not in one_line
    assert "50,000 characters" in one_line
