"""`/attach`: text files that go with the next question, each as a block with its name."""

from pathlib import Path

from offspec.chat.conversation import clean_title
from offspec.core.errors import RequestError
from offspec.ui.chat.controller import Attachment, ChatController
from offspec.ui.chat.outcomes import Outcome, ShowText
from offspec.ui.chat.save_load import as_request_error
from offspec_planners.units import format_bytes, format_count

_LONGEST = 64  # bytes that a token may have; a file of more for each token of the context is not read


def attach(chat: ChatController, argument: str) -> Outcome:
    """One more file for the next question, what there is already, or none. Raises RequestError."""
    if not argument:
        return ShowText(_listed(chat) or "Nothing is attached; `/attach notes.txt` attaches a file.")
    if argument.lower() == "none":
        chat.attached.clear()
        return ShowText("The next question goes without files.")
    with as_request_error(f"{clean_title(argument)} cannot be read"):
        file = Path(argument).expanduser()
        added = _read(file, chat)
    others = [other for other in chat.attached if other.file != added.file]
    together, room = sum(other.tokens for other in others) + added.tokens, chat.session.context
    if together >= room:
        raise RequestError(
            f"{added.name} has {format_count(added.tokens, 'token')}, {together:,} with what is attached, "
            f"and the context has room for {room:,} with question and answer; attach a part of it, or "
            "load with a larger --context"
        )
    chat.attached[:] = [*others, added]
    return ShowText(_listed(chat))


def _read(file: Path, chat: ChatController) -> Attachment:
    """Raises RequestError for what is no text, or plainly too long; OSError."""
    if file.is_dir():
        raise RequestError(f"{file} is a folder; attach the files in it one by one")
    if not file.exists():
        raise RequestError(f"there is no file {file}")
    if not file.is_file():
        raise RequestError(f"{file} is no file that could be read to its end")
    size = file.stat().st_size
    if size > _LONGEST * chat.session.context:
        raise RequestError(
            f"{file} has {format_bytes(size)}, too much for a context of {chat.session.context:,} tokens; "
            "attach a part of it"
        )
    data = file.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{file} is not text in UTF-8 (byte {error.start:,}): attach a text file, or save it as UTF-8"
        ) from None
    if "\0" in text:
        raise RequestError(f"{file} is no text: it has zero bytes in it")
    if not text.strip():
        raise RequestError(f"{file} is empty")
    text = text.replace("\r\n", "\n").rstrip()
    return Attachment(file.resolve(), clean_title(file.name), text, chat.session.count(text))


def _listed(chat: ChatController) -> str:
    lines = [
        f"- `{attachment.name}`, {format_count(attachment.tokens, 'token')}" for attachment in chat.attached
    ]
    goes = "This goes" if len(lines) == 1 else "These go"
    head = f"{goes} with the next question; `/attach none` removes what is attached:"
    return "\n".join([head, "", *lines]) if lines else ""
