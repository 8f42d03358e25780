"""`/save`, `/load` and `/export`; renaming and deleting of saved conversations.

Conversations are saved automatically; these functions name, copy and find them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from offspec.chat.archive import SessionEntry
from offspec.chat.conversation import Conversation, clean_title, copy_id
from offspec.core.errors import OffspecError, RequestError, SessionError
from offspec.core.file_lock import Claim
from offspec.core.files import real_path, write_atomic
from offspec.ui.chat.command_results import CommandResult, NewConversation, OpenView, ShowText
from offspec.ui.chat.controller import ChatController
from offspec.ui.chat.reasoning import without_reasoning


def save(chat: ChatController, argument: str) -> CommandResult:
    """Name the conversation, copy it to a file, or show where it is saved. Raises OffspecError."""
    if not chat.session.conversation.turns:
        raise RequestError("the conversation is empty, so there is nothing to save; ask a question first")
    if "/" in argument or argument.endswith(".json"):
        with as_request_error(f"{clean_title(argument)} cannot be written"):
            return _copy_to(chat, Path(argument).expanduser())
    save_as(chat, clean_title(argument))
    title = chat.session.conversation.title
    return ShowText(f"Saved as **{title}**; from now on saved automatically in `{chat.file}`.")


def save_as(chat: ChatController, title: str) -> None:
    """Save the conversation under a title, or under its own if that is empty. Raises OffspecError."""
    conversation = chat.session.conversation
    before = conversation.title
    if title:
        if others := sessions_titled(chat, title):
            raise RequestError(f"another conversation is named {others[0].title!r}; choose another name")
        conversation.title = title
    try:
        chat.session.save(chat.file)
    except OffspecError:
        conversation.title = before
        raise


def _copy_to(chat: ChatController, file: Path) -> CommandResult:
    if file.is_dir():
        raise RequestError(f"{file} is a folder; name a file in it")
    if file.exists():
        _check_overwrite(chat, file)
    chat.session.save(file)
    return ShowText(f"Copy written to `{file}`. The conversation itself stays in `{chat.file}`.")


def _check_overwrite(chat: ChatController, file: Path) -> None:
    """Raise RequestError if writing would destroy another file."""
    try:
        there = Conversation.read(file)
    except SessionError:
        raise RequestError(f"{file} already exists and is not a conversation; name another file") from None
    name = chat.session.conversation.id
    if there.id not in (name, copy_id(name, file)):
        raise RequestError(f"{file} holds another conversation, {there.title!r}; name another file")


def sessions_titled(chat: ChatController, title: str) -> list[SessionEntry]:
    """Return the other conversations in the archive with this title."""
    return [
        entry
        for entry in chat.archive.list()
        if entry.title.casefold() == title.casefold() and entry.id != chat.session.conversation.id
    ]


def load(chat: ChatController, argument: str) -> CommandResult:
    """Load another conversation, or list all. Raises OffspecError."""
    if not argument:
        return OpenView("sessions")
    return NewConversation(chat.load_conversation(chat.archive.find(argument)))


@contextmanager
def as_request_error(what: str) -> Iterator[None]:
    """Turn errors about an unusable path into RequestError, with a message that begins with `what`.

    Such a path is not accessible, is too long, contains a NUL, or begins with an unknown ~user.
    """
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"{what}: {reason}") from None


def export(chat: ChatController, argument: str) -> CommandResult:
    """Export the conversation to a Markdown file. Raises RequestError, DiskFullError."""
    conversation = chat.session.conversation
    if not argument:
        raise RequestError("no file given; name one, as in /export holiday.md")
    if not conversation.turns:
        raise RequestError("the conversation is empty, so there is nothing to export; ask a question first")
    if not argument.lower().endswith(".md"):
        raise RequestError(f"exports are Markdown; use a file name that ends in .md, not {argument!r}")
    with as_request_error(f"{clean_title(argument)} cannot be written"):
        file = Path(argument).expanduser()
        if file.is_dir():
            raise RequestError(f"{file} is a folder; name a file in it")
        if file.exists() and not _is_export_of(file, conversation):
            raise RequestError(f"{file} is there already and is not this conversation; name another file")
        write_atomic(file, as_markdown(conversation).encode())
    return ShowText(f"Conversation exported to `{file}`.")


def as_markdown(conversation: Conversation) -> str:
    """Return the questions and answers in Markdown, without reasoning and other versions."""
    parts = [_mark(conversation), f"# {conversation.title}", f"{conversation.model}, {conversation.updated}"]
    if conversation.system:
        parts += ["## System message", conversation.system]
    for message in conversation.messages:
        if message.role == "user":
            parts += ["## Question", message.content.strip()]
        elif message.content.strip():
            parts += ["## Answer", without_reasoning(message.content, message.opened).strip()]
    return "\n\n".join(parts) + "\n"


def _mark(conversation: Conversation) -> str:
    """Return the first line of an export, which identifies files that may be overwritten."""
    return f"<!-- offspec conversation {conversation.id} -->"


def _is_export_of(file: Path, conversation: Conversation) -> bool:
    with file.open("rb") as stream:
        return stream.readline(200).strip() == _mark(conversation).encode()


def rename(chat: ChatController, file: Path, title: str) -> None:
    """Rename the conversation in a file. Raises OffspecError without having changed anything."""
    title = clean_title(title)
    if not title:
        raise RequestError("the name is empty; a conversation needs a name")
    if _is_present(chat, file):
        save_as(chat, title)
        return
    same = (entry for entry in chat.archive.list() if entry.title.casefold() == title.casefold())
    if any(entry.file != file for entry in same):
        raise RequestError(f"another conversation is named {title!r}; choose another name")
    with _locked(file):
        talk = Conversation.read(file)
        talk.title = title
        talk.write(file)


def delete(chat: ChatController, file: Path) -> None:
    """Delete the file of a conversation. Raises OffspecError if it is open here or elsewhere."""
    if _is_present(chat, file):
        raise RequestError("this conversation is open here; begin a new one with /clear, then delete it")
    with _locked(file):
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            raise SessionError(f"cannot delete {file}: {error.strerror or error}") from error


def _is_present(chat: ChatController, file: Path) -> bool:
    return real_path(file) == real_path(chat.file)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Lock the file against other processes. Raises SessionError if one has it open."""
    claim = Claim(file)
    try:
        yield
    finally:
        claim.release()
