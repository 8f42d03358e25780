"""An answer whose tokens show where they came from: guessed by the draft, or added by the target."""

from collections.abc import Sequence
from itertools import groupby

from textual.content import Content

from offspec.core.events import Piece
from offspec.ui.printable import printable

# Underlined as well as coloured: the sign for terminals and eyes without colour.
_BONUS = "$text-warning underline"
_DRAFT = "$text-success"

LEGEND = "underlined: the target's own token, one a pass; the others were guessed by the draft"


def coloured(pieces: Sequence[Piece]) -> Content:
    """The text of the pieces, of which no character can act on a terminal, with a span for each run."""
    runs = groupby((piece for piece in pieces if piece.text), key=lambda piece: piece.source)
    return Content.assemble(
        *(
            (printable("".join(piece.text for piece in run)), _BONUS if source == "bonus" else _DRAFT)
            for source, run in runs
        )
    )
