"""Incremental detokenization and stop strings.

A token may contain part of a character, and a stop string may span tokens. Such text is held back until it is
final, so text that was shown is never retracted.
"""

from collections.abc import Collection, Iterable

from offspec.model.tokenizer import TextCodec

_REPLACEMENT = "\ufffd"  # decoders write it for invalid or incomplete characters
_LONGEST = 4  # maximum bytes of a character


class IncrementalDetokenizer:
    """Detokenizes an answer as it grows; each character is returned once, when it is complete.

    Decoding depends on neighbouring tokens: a leading space may be dropped at the start of a text, and a
    character may span tokens. So for each new token a window of the last tokens is decoded again. The window
    begins at the last but one position without an incomplete character, so it does not grow with the text.

    Args:
        codec: The tokenizer.
        shown: Special tokens to include in the text; others are omitted.
    """

    _MOST = 64  # maximum tokens in the window, even if no character is ever complete (invalid bytes)
    _REST = 32  # tokens left after cutting such a window

    def __init__(self, codec: TextCodec, shown: Collection[int] = ()) -> None:
        self._codec, self._shown = codec, shown
        self._window: list[int] = []
        self._boundary = 0  # tokens before the last position without an incomplete character
        self._given = ""  # text of the window that was returned

    def push(self, tokens: Iterable[int]) -> str:
        """Add tokens and return the text that they complete.

        The whole text does not depend on how tokens are divided among calls.
        """
        return "".join(map(self._piece, tokens))

    def finish(self) -> str:
        """Return the held-back text; incomplete characters become U+FFFD."""
        rest = self._text()[len(self._given) :]
        self._window, self._boundary, self._given = [], 0, ""
        return rest

    def _piece(self, token: int) -> str:
        if token in self._shown:
            return self._codec.decode_with_special([token])
        return "" if token in self._codec.special_ids else self._add(token)

    def _text(self) -> str:
        return self._codec.decode(self._window)

    def _add(self, token: int) -> str:
        self._window.append(token)
        text = self._text()
        whole = text.rstrip(_REPLACEMENT)
        piece = whole[len(self._given) :]
        self._given = self._given + piece
        if whole == text and piece:
            # No character is incomplete: tokens before the previous boundary are no longer needed.
            self._window = self._window[self._boundary :]
            self._boundary = len(self._window)
            self._given = self._codec.decode(self._window)
        elif len(self._window) > self._MOST:
            piece += self._cut(text)
        return piece

    def _cut(self, text: str) -> str:
        """Shorten a window without a boundary; return the part of its U+FFFD that is final."""
        rest = ""
        for size in range(self._REST, self._REST + _LONGEST):  # cut between characters
            before, after = self._window[:-size], self._window[-size:]
            rest = self._codec.decode(after)
            if self._codec.decode(before) + rest == text:
                break
        self._window, self._boundary = after, 0
        held = len(text) - len(self._given)
        self._given = rest.rstrip(_REPLACEMENT)
        return _REPLACEMENT * (held - (len(rest) - len(self._given)))


class StopStrings:
    """Finds the first stop string in a stream of text.

    The stop string that ends first counts; if several end together, the longest.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""  # possible beginning of a stop string
        self.stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that is final now, and whether a stop string (not included) has ended it."""
        if self.stopped:
            return "", True
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        self.stopped = bool(found)
        shown = min(found)[1] if found else len(text) - self._open(text)
        self._held = "" if found else text[shown:]
        return text[:shown], self.stopped

    def finish(self) -> str:
        """Return the held-back text at the end of the answer."""
        held, self._held = self._held, ""
        return held

    def _open(self, text: str) -> int:
        """Return the length of the longest suffix of the text that is a prefix of a stop string."""
        most = len(text) + 1
        return max(
            (n for stop in self._stops for n in range(1, min(len(stop), most)) if text.endswith(stop[:n])),
            default=0,
        )


class TextStream:
    """Text of an answer, token by token, up to its first stop string.

    Args:
        codec: The tokenizer.
        stops: Stop strings.
        shown: See `IncrementalDetokenizer`.
    """

    def __init__(self, codec: TextCodec, stops: Iterable[str] = (), shown: Collection[int] = ()) -> None:
        self._text = IncrementalDetokenizer(codec, shown)
        self._stops = StopStrings(stops)
        self._ready: list[str] = []

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stops.stopped

    def push(self, token: int) -> bool:
        """Add a token; return True if it completes a stop string, so it is the last token of the answer."""
        piece, stopped = self._stops.push(self._text.push([token]))
        self._ready.append(piece)
        return stopped

    def take(self) -> list[str]:
        """Return the text that became final since the last call, one piece per token pushed."""
        pieces, self._ready = self._ready, []
        return pieces

    def finish(self) -> list[str]:
        """Return the pieces left, and the held-back text as one more piece, empty after a stop string."""
        piece, _ = self._stops.push(self._text.finish())
        return [*self.take(), piece + self._stops.finish()]
