"""Finished characters out.

A token may hold part of a character, and a stop string may begin in one token and end in another. Both are
kept back until they are decided, so that text once shown is never taken back.
"""

from collections.abc import Collection, Iterable

from offspec.model.tokenizer import TextCodec

_REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no character, or none yet
_LONGEST = 4  # bytes of a character


class IncrementalText:
    """Detokenises an answer as it grows; each character is given once, when it is whole.

    Decoding needs neighbours: a word's leading space may be dropped at the start of a text, and a
    character may lie across tokens. So a window of the last tokens is decoded again for each new one, from
    the last but one place where no character was open. Its size does not grow with the text.

    shown: special tokens that are spelt out; the others are left out.
    """

    _MOST = 64  # tokens in the window, even when no character ever ends (bytes that are no text)
    _REST = 32  # tokens left when it is cut for that reason

    def __init__(self, codec: TextCodec, shown: Collection[int] = ()) -> None:
        self._codec, self._shown = codec, shown
        self._window: list[int] = []
        self._boundary = 0  # tokens of the window that stand before the last place with nothing open
        self._given = ""  # text of the window that was given out

    def push(self, tokens: Iterable[int]) -> str:
        """The text that these tokens complete. How an answer is cut into pushes makes no difference."""
        return "".join(map(self._piece, tokens))

    def finish(self) -> str:
        """What was held back: characters that were never completed, as U+FFFD."""
        rest = self._text()[len(self._given) :]
        self._window, self._boundary, self._given = [], 0, ""
        return rest

    def _piece(self, token: int) -> str:
        if token in self._shown:
            return self._codec.spell([token])
        return "" if token in self._codec.hidden_ids else self._add(token)

    def _text(self) -> str:
        return self._codec.decode(self._window)

    def _add(self, token: int) -> str:
        self._window.append(token)
        text = self._text()
        whole = text.rstrip(_REPLACEMENT)
        piece = whole[len(self._given) :]
        self._given = self._given + piece
        if whole == text and piece:
            # Nothing is open. What came before the previous such place is no longer needed.
            self._window = self._window[self._boundary :]
            self._boundary = len(self._window)
            self._given = self._codec.decode(self._window)
        elif len(self._window) > self._MOST:
            piece += self._cut(text)
        return piece

    def _cut(self, text: str) -> str:
        """Shortens a window that finds no end; gives the part of its U+FFFD that nothing can mend."""
        rest = ""
        for size in range(self._REST, self._REST + _LONGEST):  # between characters, so that none is parted
            before, after = self._window[:-size], self._window[-size:]
            rest = self._codec.decode(after)
            if self._codec.decode(before) + rest == text:
                break
        self._window, self._boundary = after, 0
        held = len(text) - len(self._given)
        self._given = rest.rstrip(_REPLACEMENT)
        return _REPLACEMENT * (held - (len(rest) - len(self._given)))


class StopStrings:
    """Finds the first stop string in a text that comes in pieces.

    Of several, the one that ends first counts; of those that end together, the longest.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""  # could be the beginning of a stop string
        self.stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """The text that may be shown now, and whether a stop string (which is not shown) has ended it."""
        if self.stopped:
            return "", True
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        self.stopped = bool(found)
        shown = min(found)[1] if found else len(text) - self._open(text)
        self._held = "" if found else text[shown:]
        return text[:shown], self.stopped

    def finish(self) -> str:
        """What was held back, now that nothing can complete it."""
        held, self._held = self._held, ""
        return held

    def _open(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        most = len(text) + 1
        return max(
            (n for stop in self._stops for n in range(1, min(len(stop), most)) if text.endswith(stop[:n])),
            default=0,
        )


class TextStream:
    """An answer's text as its tokens are chosen, one by one, and the place where a stop string ends it.

    shown: see `IncrementalText`.
    """

    def __init__(self, codec: TextCodec, stops: Iterable[str] = (), shown: Collection[int] = ()) -> None:
        self._text = IncrementalText(codec, shown)
        self._stops = StopStrings(stops)
        self._ready: list[str] = []

    @property
    def stopped(self) -> bool:
        """A stop string was found."""
        return self._stops.stopped

    def push(self, token: int) -> bool:
        """Adds a token; True when it completes a stop string, and is the last one to keep."""
        piece, stopped = self._stops.push(self._text.push([token]))
        self._ready.append(piece)
        return stopped

    def take(self) -> list[str]:
        """The text that became final since it was last taken: a piece for each token pushed."""
        pieces, self._ready = self._ready, []
        return pieces

    def finish(self) -> list[str]:
        """All that is left, once no token will follow, as one piece more. Nothing after a stop string."""
        piece, _ = self._stops.push(self._text.finish())
        return [*self.take(), piece + self._stops.finish()]
