"""Texts that a lookup may copy from, beside what is said here: files, and conversations that were saved."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from offspec.chat.conversation import Conversation
from offspec.core.errors import RequestError, SessionError

_MOST = 2**20  # characters in all, about as many as `SuffixLookup` has room for


def read_corpus(places: Sequence[Path]) -> list[str]:
    """The texts of files and of folders, the oldest first; of more than fits, the newest.

    In a folder, and the folders in it, what is no text is passed over, and so is what is hidden. Raises
    RequestError for a place that is not there, and for a named file that is no text.
    """
    files = [file for place in places for file in _files(place.expanduser())]
    texts, room = list[str](), _MOST
    for file in sorted(set(files), key=_changed, reverse=True):
        text = _text(file)
        if text is None:
            if file in {place.expanduser() for place in places}:
                raise RequestError(f"{file} cannot be read as text: name other files in `corpus`")
            continue
        if room <= 0:
            break
        texts.append(text[-room:])
        room -= len(text)
    return texts[::-1]


def _files(place: Path) -> Iterator[Path]:
    if place.is_file():
        yield place
    elif place.is_dir():
        for file in place.rglob("*"):
            shown = not any(part.startswith(".") for part in file.relative_to(place).parts)
            if shown and file.is_file():
                yield file
    else:
        raise RequestError(f"there is no file or folder {place} to draft from: check `corpus`")


def _changed(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:  # it went away in between
        return 0.0


def _text(file: Path) -> str | None:
    """What was said in a saved conversation, or the text of another file; None where it is neither."""
    try:
        if file.suffix == ".json":
            messages = Conversation.read(file).messages
            return "\n".join(message.content for message in messages)
    except SessionError:
        pass
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
