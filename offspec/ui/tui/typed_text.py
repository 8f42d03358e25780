"""Typed text that Textual loses: characters such as U+200D, and all after a wrong byte or a pasted escape.

Its widgets insert a key whose character is printable by `str.isprintable`, which no character of these kinds
is: joiners and marks of direction (Cf), spaces but U+0020, as U+00A0 and U+3000 (Zs), private use (Co), and
what this Python's Unicode does not know yet, as the newest emoji (Cn).
"""

import codecs
import unicodedata

from textual import events
from textual._xterm_parser import BRACKETED_PASTE_END, BRACKETED_PASTE_START
from textual.drivers import linux_driver


def as_text(event: events.Event) -> events.Event:
    """The event, or for a key with such a character a paste of it, which every widget takes."""
    if not isinstance(event, events.Key) or event.is_forwarded or event.is_printable:
        return event
    character = event.character or ""
    if len(character) != 1 or unicodedata.category(character) in ("Cc", "Cs"):
        return event
    return events.Paste(character)


class TerminalDecoder:
    """UTF-8 of a terminal, with U+FFFD for a wrong byte and for an escape character within a bracketed paste.

    Textual would take what follows such an escape for keys: it would move to the front of the text, and a
    line break in it would send the text before it is whole.
    """

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._pasting = False
        self._kept = ""  # end of the text so far, which may be the beginning of a mark

    def decode(self, data: bytes, final: bool = False) -> str:
        """The text of these bytes. In a paste, what may begin its end mark waits for more."""
        text, decoded = self._utf8.decode(data, final), ""
        while text:
            mark = BRACKETED_PASTE_END if self._pasting else BRACKETED_PASTE_START
            before, found, text_after = (self._kept + text).partition(mark)
            kept = "" if found else _beginning(mark, before)
            if self._pasting:
                decoded += before.removesuffix(kept).replace("\x1b", "\ufffd") + found
            else:
                decoded += text.removesuffix(text_after) if found else text
            self._kept, text = kept, text_after
            self._pasting ^= bool(found)
        return decoded


def _beginning(mark: str, text: str) -> str:
    """The longest end of the text with which the mark begins, but not all of it; "" without one."""
    return next((mark[:n] for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), "")


def keep_all_text() -> None:
    """Decode what a terminal sends by `TerminalDecoder`. Textual itself would end at a wrong byte."""
    vars(linux_driver)["getincrementaldecoder"] = lambda encoding: TerminalDecoder
