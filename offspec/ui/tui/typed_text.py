"""What Textual loses of typed text: characters such as U+200D, which joins emoji, and all after a wrong byte.

Its widgets insert a key whose character is printable by `str.isprintable`, which no character of these kinds
is: joiners and marks of direction (Cf), spaces but U+0020, as U+00A0 and U+3000 (Zs), private use (Co), and
what this Python's Unicode does not know yet, as the newest emoji (Cn).
"""

import codecs
import unicodedata
from functools import partial

from textual import events
from textual.drivers import linux_driver


def as_text(event: events.Event) -> events.Event:
    """The event, or for a key with such a character a paste of it, which every widget takes."""
    if not isinstance(event, events.Key) or event.is_forwarded or event.is_printable:
        return event
    character = event.character or ""
    if len(character) != 1 or unicodedata.category(character) in ("Cc", "Cs"):
        return event
    return events.Paste(character)


def keep_wrong_bytes() -> None:
    """Show U+FFFD for a typed byte that is not UTF-8. Textual would end the program with a traceback."""
    vars(linux_driver)["getincrementaldecoder"] = lambda encoding: partial(
        codecs.getincrementaldecoder(encoding), errors="replace"
    )
