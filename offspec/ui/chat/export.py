"""`/export`: the conversation as a Markdown file to read or pass on."""

from pathlib import Path

from offspec.chat.conversation import Conversation, clean_title
from offspec.core.errors import RequestError
from offspec.core.files import write_file
from offspec.ui.chat.controller import ChatController
from offspec.ui.chat.outcomes import Outcome, ShowText
from offspec.ui.chat.save_load import as_request_error
from offspec.ui.chat.thinking import without_thinking


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
