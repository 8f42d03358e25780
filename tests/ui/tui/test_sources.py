"""Tokens coloured by where they came from."""

from offspec.core.events import Piece
from offspec.ui.tui.sources import LEGEND, coloured

PIECES = (Piece("The", "draft"), Piece(" sky", "draft"), Piece(" is", "bonus"), Piece("", "draft"))


def test_the_text_is_that_of_the_pieces() -> None:
    assert coloured(PIECES).plain == "The sky is"
    assert coloured(()).plain == ""


def test_the_targets_own_tokens_are_underlined_as_well_as_coloured() -> None:
    underlined = [
        coloured(PIECES).plain[span.start : span.end]
        for span in coloured(PIECES).spans
        if "underline" in str(span.style)
    ]
    assert underlined == [" is"]
    assert "underlined" in LEGEND


def test_a_run_of_one_source_is_one_span() -> None:
    assert len(coloured(PIECES).spans) == 2


def test_nothing_in_an_answer_is_markup_or_obeyed_by_a_terminal() -> None:
    hostile = coloured((Piece("[red]x[/red]\x1b[2J\n\ty\x07", "draft"),)).plain
    assert hostile == "[red]x[/red]�[2J\n\ty�"
