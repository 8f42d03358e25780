"""What `/save` and `/load` do. Conversations are kept as they go; these name, copy and find them."""

from pathlib import Path
from typing import TYPE_CHECKING

from offspec.chatting.outcomes import Open, Outcome, Reset, Say
from offspec.conversation import Conversation, clean_title
from offspec.errors import RequestError, SessionError

if TYPE_CHECKING:
    from offspec.chatting.desk import Desk


def save(desk: "Desk", argument: str) -> Outcome:
    """A name for the conversation, a copy in a file, or only where it is. Raises OffspecError."""
    if not desk.session.conversation.turns:
        raise RequestError("nothing has been asked yet, so there is nothing to save")
    if _names_file(argument):
        return _copy_to(desk, Path(argument).expanduser())
    if argument:
        _give_title(desk, clean_title(argument))
    desk.session.save(desk.file)
    return Say(
        f"Saved as **{desk.session.conversation.title}**, and from now on by itself, in `{desk.file}`."
    )


def _names_file(argument: str) -> bool:
    return "/" in argument or argument.endswith(".json")


def _copy_to(desk: "Desk", file: Path) -> Outcome:
    if file.is_dir():
        raise RequestError(f"{file} is a folder; name a file in it")
    if file.exists():
        _check_same(desk, file)
    desk.session.save(file)
    return Say(f"A copy as of now is in `{file}`. What is said from here on is kept in `{desk.file}`.")


def _check_same(desk: "Desk", file: Path) -> None:
    """Raises RequestError where a file that is there would be lost."""
    try:
        there = Conversation.read(file)
    except SessionError:
        raise RequestError(f"{file} is there already and is no conversation; name another file") from None
    if there.id != desk.session.conversation.id:
        raise RequestError(f"{file} holds another conversation, {there.title!r}; name another file")


def _give_title(desk: "Desk", title: str) -> None:
    conversation = desk.session.conversation
    for entry in desk.archive.list():
        if entry.title.lower() == title.lower() and entry.id != conversation.id:
            raise RequestError(f"another conversation is called {entry.title!r}; choose another name")
    conversation.title = title


def load(desk: "Desk", argument: str) -> Outcome:
    """Another conversation, or the list of them. Raises OffspecError."""
    if not argument:
        return Open("sessions")
    return Reset(desk.take_up(desk.archive.find(argument)))
