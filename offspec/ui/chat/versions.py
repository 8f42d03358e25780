"""`/retry`, `/edit`, `/undo` and `/branch`: a turn asked again, taken back, and found again."""

from offspec.chat.branches import Fork
from offspec.chat.conversation import headline
from offspec.core.errors import RequestError
from offspec.ui.chat import settings
from offspec.ui.chat.commands import escaped, unescaped
from offspec.ui.chat.controller import ChatController
from offspec.ui.chat.outcomes import EditQuestion, Offer, Outcome, Rewound, ShowText, StreamAnswer, Switched

_OTHER = 0.7  # a temperature at which answers differ and make sense


def retry(chat: ChatController, argument: str) -> Outcome:
    """Another answer to the last question, at a temperature that is given or as set. Raises RequestError."""
    _check_turns(chat, 1)
    params = chat.session.params
    if argument:
        params = settings.changed(params, f"temperature={argument}", params)
    if chat.has_answer(params):
        return Offer(
            "Nothing would differ: at temperature 0 this question has the same answer each time. "
            f"`/retry {_OTHER}` answers once at temperature {_OTHER}.",
            f"/retry {_OTHER}",
        )
    last = chat.session.messages[-1]
    dropped = (last,) if last.role == "assistant" else ()
    return StreamAnswer(chat.retry(params), None, dropped)


def edit(chat: ChatController, argument: str) -> Outcome:
    """The last question in other words, or those it has, to be changed. Raises RequestError."""
    _check_turns(chat, 1)
    turn = chat.session.messages[_last_question(chat) :]
    if not argument:
        return EditQuestion(turn[0].content, f"/edit {escaped(turn[0].content)}")
    question = unescaped(argument)
    return StreamAnswer(chat.edit(question), question, turn)


def undo(chat: ChatController, argument: str) -> Outcome:
    """The version before of the last turn; where it has one only, or a number is given, turns are removed.

    Raises RequestError.
    """
    turns = count(argument, "/undo 2 takes back the last two questions")
    _check_turns(chat, turns)
    at = _last_question(chat)
    fork = next((fork for fork in chat.session.branches if fork.at == at), None)
    if argument or fork is None:
        return Rewound(chat.session.rewind(turns))
    if not fork.active:
        raise RequestError(
            f"this is the first of {len(fork.versions)} versions: /branch lists them, and /undo 1 removes "
            "the question with all of them"
        )
    return switch(chat, fork, fork.active - 1)


def branch(chat: ChatController, argument: str) -> Outcome:
    """Another version of a turn, or the list of them. Raises RequestError."""
    forks = chat.session.branches
    if not forks:
        raise RequestError("every question has one answer yet; /retry and /edit make more")
    if not argument:
        return ShowText("\n\n".join(map(_listed, forks)))
    number, *question = (count(word, "/branch 2 shows the second version") for word in argument.split())
    if len(question) > 1:
        raise RequestError("/branch takes the number of a version, and that of a question")
    wanted = [fork for fork in forks if not question or fork.at // 2 + 1 == question[0]]
    if not wanted:
        raise RequestError(f"question {question[0]} has one version; /branch lists those that have several")
    fork = wanted[-1]
    if number > len(fork.versions):
        raise RequestError(f"there are only {len(fork.versions)} versions of question {fork.at // 2 + 1}")
    return switch(chat, fork, number - 1)


def switch(chat: ChatController, fork: Fork, number: int) -> Outcome:
    """This version of that turn, counted from 0, and what followed it. Raises RequestError."""
    dropped = chat.session.messages[fork.at :]
    chat.session.switch(number, fork.at)
    shown = chat.session.messages[fork.at :]
    return Switched(fork.at, dropped, shown, f"{number + 1} of {len(fork.versions)}")


def count(argument: str, example: str) -> int:
    """How many, by default one. Raises RequestError."""
    if not argument:
        return 1
    digits = argument.lstrip("0") if argument.isascii() and argument.isdigit() else ""
    if not digits:
        raise RequestError(f"{argument!r} is no number above 0; {example}")
    return int(digits[:9])  # no conversation has more, and Python reads no more than 4300


def _listed(fork: Fork) -> str:
    question = fork.at // 2 + 1
    lines = [f"Question {question} has {len(fork.versions)}; `/branch 1 {question}` shows the first:", ""]
    for number, version in enumerate(fork.versions):
        here = " (this one)" if number == fork.active else ""
        lines.append(f"{number + 1}. {headline(version[:1])}: {headline(version[1:]) or '…'}{here}")
    return "\n".join(lines)


def _last_question(chat: ChatController) -> int:
    """Where it is in the messages."""
    return max(at for at, message in enumerate(chat.session.messages) if message.role == "user")


def _check_turns(chat: ChatController, wanted: int) -> None:
    """Raises RequestError where fewer questions were asked."""
    turns = chat.session.conversation.turns
    if not turns:
        raise RequestError("nothing has been asked yet")
    if turns < wanted:
        asked = "one question has" if turns == 1 else f"{turns} questions have"
        raise RequestError(f"only {asked} been asked; /undo {turns} takes everything back")
