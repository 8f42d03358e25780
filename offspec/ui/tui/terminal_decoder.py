"""Input that Textual loses: characters such as U+200D, and everything after a wrong byte or a pasted escape.

Textual's widgets insert a key only if its character is printable by `str.isprintable`. That excludes joiners
and direction marks (Cf), spaces other than U+0020, such as U+00A0 and U+3000 (Zs), private use (Co), and
characters unknown to this Python's Unicode version, such as the newest emoji (Cn).
"""

import codecs
import unicodedata

from textual import events
from textual._xterm_parser import BRACKETED_PASTE_END, BRACKETED_PASTE_START
from textual.drivers import linux_driver


def as_paste_event(event: events.Event) -> events.Event:
    """Return the event, or for a key that Textual would drop a paste event, which every widget accepts."""
    if not isinstance(event, events.Key) or event.is_forwarded or event.is_printable:
        return event
    character = event.character or ""
    if len(character) != 1 or unicodedata.category(character) in ("Cc", "Cs"):
        return event
    return events.Paste(character)


class TerminalDecoder:
    """UTF-8 decoder of terminal input, with U+FFFD for wrong bytes and for escapes in a bracketed paste.

    Textual would treat characters after such an escape as keys: they would be inserted before the text, and a
    line break among them would send an incomplete text.
    """

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._pasting = False
        self._kept = ""  # end of the text so far that may be the beginning of a mark

    def decode(self, data: bytes, final: bool = False) -> str:
        """Decode bytes. In a paste, a possible beginning of the end mark is held back."""
        text, decoded = self._utf8.decode(data, final), ""
        while text:
            mark = BRACKETED_PASTE_END if self._pasting else BRACKETED_PASTE_START
            before, found, text_after = (self._kept + text).partition(mark)
            kept = "" if found else _partial_mark(mark, before)
            if self._pasting:
                decoded += before.removesuffix(kept).replace("\x1b", "\ufffd") + found
            else:
                decoded += text.removesuffix(text_after) if found else text
            self._kept, text = kept, text_after
            self._pasting ^= bool(found)
        return decoded


def _partial_mark(mark: str, text: str) -> str:
    """Return the longest end of the text that is a proper prefix of the mark, or ""."""
    return next((mark[:n] for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), "")


def install_terminal_decoder() -> None:
    """Install `TerminalDecoder` for terminal input, because Textual itself exits at a wrong byte."""
    vars(linux_driver)["getincrementaldecoder"] = lambda encoding: TerminalDecoder
