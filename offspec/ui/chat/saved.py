"""Renaming and deleting saved conversations."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from offspec.chat.conversation import Conversation, clean_title
from offspec.core.errors import RequestError, SessionError
from offspec.core.file_lock import Claim
from offspec.core.files import real_path
from offspec.ui.chat.controller import ChatController
from offspec.ui.chat.save_load import save_as


def rename(chat: ChatController, file: Path, title: str) -> None:
    """Give the conversation in a file another title. Raises OffspecError; nothing has changed then."""
    title = clean_title(title)
    if not title:
        raise RequestError("a conversation needs a name")
    if _is_present(chat, file):
        save_as(chat, title)
        return
    same = (entry for entry in chat.archive.list() if entry.title.casefold() == title.casefold())
    if any(entry.file != file for entry in same):
        raise RequestError(f"another conversation is called {title!r}; choose another name")
    with _claimed(file):
        talk = Conversation.read(file)
        talk.title = title
        talk.write(file)


def delete(chat: ChatController, file: Path) -> None:
    """Delete the file of a conversation. Raises OffspecError for one that is open, here or elsewhere."""
    if _is_present(chat, file):
        raise RequestError("this conversation is open here; begin a new one with /clear, then delete it")
    with _claimed(file):
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            raise SessionError(f"cannot delete {file}: {error.strerror or error}") from error


def _is_present(chat: ChatController, file: Path) -> bool:
    return real_path(file) == real_path(chat.file)


@contextmanager
def _claimed(file: Path) -> Iterator[None]:
    """In the block no other process writes the file. Raises SessionError if one has it open."""
    claim = Claim(file)
    try:
        yield
    finally:
        claim.release()
