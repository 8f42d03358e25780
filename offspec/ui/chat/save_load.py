"""What `/save` and `/load` do. Conversations are kept as they go; these name, copy and find them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from offspec.chat.archive import Entry
from offspec.chat.conversation import Conversation, clean_title, copy_id
from offspec.core.errors import OffspecError, RequestError, SessionError
from offspec.ui.chat.controller import ChatController
from offspec.ui.chat.outcomes import OpenView, Outcome, Reset, ShowText


def save(chat: ChatController, argument: str) -> Outcome:
    """A name for the conversation, a copy in a file, or only where it is. Raises OffspecError."""
    if not chat.session.conversation.turns:
        raise RequestError("nothing has been asked yet, so there is nothing to save")
    if _names_file(argument):
        with as_request_error(f"{clean_title(argument)} cannot be written"):
            return _copy_to(chat, Path(argument).expanduser())
    save_as(chat, clean_title(argument))
    title = chat.session.conversation.title
    return ShowText(f"Saved as **{title}**, and from now on by itself, in `{chat.file}`.")


def save_as(chat: ChatController, title: str) -> None:
    """Save the conversation under a title, or if that is empty under its own. Raises OffspecError."""
    conversation = chat.session.conversation
    before = conversation.title
    if title:
        conversation.title = _free_title(chat, title)
    try:
        chat.session.save(chat.file)
    except OffspecError:
        conversation.title = before
        raise


def _names_file(argument: str) -> bool:
    return "/" in argument or argument.endswith(".json")


def _copy_to(chat: ChatController, file: Path) -> Outcome:
    if file.is_dir():
        raise RequestError(f"{file} is a folder; name a file in it")
    if file.exists():
        _check_same(chat, file)
    chat.session.save(file)
    return ShowText(f"A copy as of now is in `{file}`. What is said from here on is kept in `{chat.file}`.")


def _check_same(chat: ChatController, file: Path) -> None:
    """Raises RequestError where a file that is there would be lost."""
    try:
        there = Conversation.read(file)
    except SessionError:
        raise RequestError(f"{file} is there already and is no conversation; name another file") from None
    name = chat.session.conversation.id
    if there.id not in (name, copy_id(name, file)):
        raise RequestError(f"{file} holds another conversation, {there.title!r}; name another file")


def _free_title(chat: ChatController, title: str) -> str:
    """The title. Raises RequestError where another conversation has it."""
    others = others_titled(chat, title)
    if others:
        raise RequestError(f"another conversation is called {others[0].title!r}; choose another name")
    return title


def others_titled(chat: ChatController, title: str) -> list[Entry]:
    """Conversations in the archive with this title, without the present one."""
    return [
        entry
        for entry in chat.archive.list()
        if entry.title.casefold() == title.casefold() and entry.id != chat.session.conversation.id
    ]


def load(chat: ChatController, argument: str) -> Outcome:
    """Another conversation, or the list of them. Raises OffspecError."""
    if not argument:
        return OpenView("sessions")
    return Reset(chat.load_conversation(chat.archive.find(argument)))


@contextmanager
def as_request_error(what: str) -> Iterator[None]:
    """Raises RequestError, which begins with `what`, for a path that the system does not take.

    It may not be looked at, is too long, has a NUL in it, or begins with an unknown ~user.
    """
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"{what}: {reason}") from None
