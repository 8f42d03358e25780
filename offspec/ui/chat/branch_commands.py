"""`/retry`, `/edit`, `/undo` and `/branch`: versions of a turn."""

from offspec.chat.branches import Fork
from offspec.chat.conversation import title_of
from offspec.core.errors import RequestError
from offspec.ui.chat import settings
from offspec.ui.chat.command_results import (
    BranchSwitched,
    CommandResult,
    EditQuestion,
    ShowText,
    StreamAnswer,
    SuggestCommand,
    TurnsRemoved,
)
from offspec.ui.chat.commands import escaped, unescaped
from offspec.ui.chat.controller import ChatController

_OTHER = 0.7  # suggested temperature: answers vary but stay sensible


def retry(chat: ChatController, argument: str) -> CommandResult:
    """Answer the last question again, at a given temperature or the current one. Raises RequestError."""
    _check_turns(chat, 1)
    params = chat.session.params
    if argument:
        params = settings.apply_changes(params, f"temperature={argument}", params)
    if chat.has_answer(params):
        return SuggestCommand(
            "At temperature 0, this question always gets the same answer. "
            f"`/retry {_OTHER}` answers once at temperature {_OTHER}.",
            f"/retry {_OTHER}",
        )
    last = chat.session.messages[-1]
    dropped = (last,) if last.role == "assistant" else ()
    return StreamAnswer(chat.retry(params), None, dropped)


def edit(chat: ChatController, argument: str) -> CommandResult:
    """Replace the last question, or return it for editing. Raises RequestError."""
    _check_turns(chat, 1)
    turn = chat.session.messages[_last_question(chat) :]
    if not argument:
        return EditQuestion(turn[0].content, f"/edit {escaped(turn[0].content)}")
    question = unescaped(argument)
    return StreamAnswer(chat.edit(question), question, turn)


def undo(chat: ChatController, argument: str) -> CommandResult:
    """Return to the previous version of the last turn, or remove turns. Raises RequestError.

    Turns are removed if a number is given or if the last turn has only one version.
    """
    turns = parse_count(argument, "/undo 2 removes the last two questions")
    _check_turns(chat, turns)
    at = _last_question(chat)
    fork = next((fork for fork in chat.session.branches if fork.at == at), None)
    if argument or fork is None:
        return TurnsRemoved(chat.session.rewind(turns))
    if not fork.active:
        raise RequestError(
            f"this is the first of {len(fork.versions)} versions: /branch lists them, and /undo 1 removes "
            "the question with all of them"
        )
    return switch(chat, fork, fork.active - 1)


def branch(chat: ChatController, argument: str) -> CommandResult:
    """Switch to another version of a turn, or list the versions. Raises RequestError."""
    forks = chat.session.branches
    if not forks:
        raise RequestError("no other versions yet; create one with /retry or /edit")
    if not argument:
        return ShowText("\n\n".join(map(_listed, forks)))
    number, *question = (parse_count(word, "/branch 2 shows the second version") for word in argument.split())
    if len(question) > 1:
        raise RequestError("/branch takes at most two numbers: a version and a question, as in /branch 2 1")
    wanted = [fork for fork in forks if not question or fork.at // 2 + 1 == question[0]]
    if not wanted:
        raise RequestError(
            f"question {question[0]} has no other versions; /branch lists questions that have several"
        )
    fork = wanted[-1]
    if number > len(fork.versions):
        raise RequestError(f"there are only {len(fork.versions)} versions of question {fork.at // 2 + 1}")
    return switch(chat, fork, number - 1)


def switch(chat: ChatController, fork: Fork, number: int) -> CommandResult:
    """Switch to a version of a turn, counted from 0, with everything after it. Raises RequestError."""
    dropped = chat.session.messages[fork.at :]
    chat.session.switch(number, fork.at)
    shown = chat.session.messages[fork.at :]
    return BranchSwitched(fork.at, dropped, shown, f"{number + 1} of {len(fork.versions)}")


def parse_count(argument: str, example: str) -> int:
    """Parse a positive number, by default 1. Raises RequestError."""
    if not argument:
        return 1
    digits = argument.lstrip("0") if argument.isascii() and argument.isdigit() else ""
    if not digits:
        raise RequestError(f"{argument!r} is not a number above 0; {example}")
    return int(digits[:9])  # no conversation has more turns; Python parses at most 4300 digits


def _listed(fork: Fork) -> str:
    question = fork.at // 2 + 1
    lines = [
        f"Question {question} has {len(fork.versions)} versions; `/branch 1 {question}` shows the first:",
        "",
    ]
    for number, version in enumerate(fork.versions):
        here = " (this one)" if number == fork.active else ""
        lines.append(f"{number + 1}. {title_of(version[:1])}: {title_of(version[1:]) or '…'}{here}")
    return "\n".join(lines)


def _last_question(chat: ChatController) -> int:
    """Return the index of the last question in the messages."""
    return max(at for at, message in enumerate(chat.session.messages) if message.role == "user")


def _check_turns(chat: ChatController, wanted: int) -> None:
    """Raise RequestError if fewer questions were asked."""
    turns = chat.session.conversation.turns
    if not turns:
        raise RequestError("the conversation is empty; ask a question first")
    if turns < wanted:
        count = "one question" if turns == 1 else f"{turns} questions"
        raise RequestError(f"the conversation has only {count}; /undo {turns} removes everything")
