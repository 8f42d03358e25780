"""An answer whose tokens show where they came from: guessed by the draft, or added by the target."""

from collections.abc import Sequence

from textual.content import Content

from offspec.chatting.printable import printable
from offspec.events import Piece

# Underlined as well as coloured: the sign for terminals and eyes without colour.
_BONUS = "$text-warning underline"
_DRAFT = "$text-success"

LEGEND = "underlined: the target's own token, one a pass; the others were guessed by the draft"


def coloured(pieces: Sequence[Piece]) -> Content:
    """The text of the pieces, of which no character can act on a terminal."""
    return Content.assemble(
        *(
            (printable(piece.text), _BONUS if piece.source == "bonus" else _DRAFT)
            for piece in pieces
            if piece.text
        )
    )
