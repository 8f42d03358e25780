"""What is printed when a chat is left: the command that continues its conversation."""

import shlex
from collections.abc import Sequence

from offspec.ui.chat.controller import ChatController

_WITH_VALUE = ("--session", "--system")  # the conversation has its own system message by then


def command_words(argv: Sequence[str]) -> tuple[str, ...]:
    """The command that began this chat, without options that name a conversation.

    Args:
        argv: As in `sys.argv`: the program and its words, the first of which is "chat".
    """
    words, rest = ["offspec"], iter(argv[1:])
    for word in rest:
        name, equals, _ = word.partition("=")
        if name in _WITH_VALUE:
            if not equals:
                next(rest, None)
        elif word != "--resume":
            words.append(word)
    return tuple(words)


def resume_line(chat: ChatController) -> str:
    """What to type to go on; "" where nothing was said, or it could not be saved."""
    conversation = chat.session.conversation
    if not conversation.turns or not chat.file.exists():
        return ""
    kept_here = chat.file == chat.archive.file_for(conversation)
    name = conversation.id if kept_here else str(chat.file.resolve())
    return f"to continue: {shlex.join((*chat.setup.command, '--session', name))}"
