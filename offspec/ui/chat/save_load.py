"""`/save`, `/load` and `/export`, and saved conversations renamed and deleted.

Conversations are kept as they go; these name, copy and find them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from offspec.chat.archive import Entry
from offspec.chat.conversation import Conversation, clean_title, copy_id
from offspec.core.errors import OffspecError, RequestError, SessionError
from offspec.core.file_lock import Claim
from offspec.core.files import real_path, write_file
from offspec.ui.chat.controller import ChatController
from offspec.ui.chat.outcomes import OpenView, Outcome, Reset, ShowText
from offspec.ui.chat.thinking import without_thinking


def save(chat: ChatController, argument: str) -> Outcome:
    """A name for the conversation, a copy in a file, or only where it is. Raises OffspecError."""
    if not chat.session.conversation.turns:
        raise RequestError("nothing has been asked yet, so there is nothing to save")
    if "/" in argument or argument.endswith(".json"):
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
        if others := others_titled(chat, title):
            raise RequestError(f"another conversation is called {others[0].title!r}; choose another name")
        conversation.title = title
    try:
        chat.session.save(chat.file)
    except OffspecError:
        conversation.title = before
        raise


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


def export(chat: ChatController, argument: str) -> Outcome:
    """Raises RequestError, and DiskFullError."""
    conversation = chat.session.conversation
    if not argument:
        raise RequestError("name a file, as in /export holiday.md")
    if not conversation.turns:
        raise RequestError("nothing has been asked yet, so there is nothing to export")
    if not argument.lower().endswith(".md"):
        raise RequestError(f"what is exported is Markdown: name a file that ends in .md, not {argument!r}")
    with as_request_error(f"{clean_title(argument)} cannot be written"):
        file = Path(argument).expanduser()
        if file.is_dir():
            raise RequestError(f"{file} is a folder; name a file in it")
        if file.exists() and not _is_ours(file, conversation):
            raise RequestError(f"{file} is there already and is not this conversation; name another file")
        write_file(file, as_markdown(conversation).encode())
    return ShowText(f"The conversation as of now is in `{file}`.")


def as_markdown(conversation: Conversation) -> str:
    """Questions and answers as they are shown, without what was thought and without other versions."""
    parts = [_mark(conversation), f"# {conversation.title}", f"{conversation.model}, {conversation.updated}"]
    if conversation.system:
        parts += ["## System message", conversation.system]
    for message in conversation.messages:
        if message.role == "user":
            parts += ["## Question", message.content.strip()]
        elif message.content.strip():
            parts += ["## Answer", without_thinking(message.content, message.opened).strip()]
    return "\n\n".join(parts) + "\n"


def _mark(conversation: Conversation) -> str:
    """The first line, by which a file is known to be written again."""
    return f"<!-- offspec conversation {conversation.id} -->"


def _is_ours(file: Path, conversation: Conversation) -> bool:
    with file.open("rb") as stream:
        return stream.readline(200).strip() == _mark(conversation).encode()


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
