"""Extra texts for prompt lookup: files and saved conversations."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from offspec.chat.conversation import Conversation
from offspec.core.errors import RequestError, SessionError

_MOST = 2**20  # total characters, about the capacity of `SuffixLookup`


def read_corpus(places: Sequence[Path]) -> list[str]:
    """Return the texts of files and folders, oldest first; if they exceed the capacity, only the newest.

    Folders are searched recursively; hidden files and files that are not text are skipped.

    Raises:
        RequestError: A path does not exist, or a named file is not text.
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
        raise RequestError(f"no file or folder {place} to draft from: check `corpus`")


def _changed(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:  # removed meanwhile
        return 0.0


def _text(file: Path) -> str | None:
    """Return the messages of a saved conversation, or the text of another file; None if it is neither."""
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
