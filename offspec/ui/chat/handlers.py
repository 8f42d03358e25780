"""What the commands do: each takes the desk and what was typed after the name, and says what came of it."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from offspec.checkpoint.open import DEMO, local_path
from offspec.core.config import AUTO, SOURCES, read_drafts
from offspec.core.errors import RequestError
from offspec.ui.chat import settings
from offspec.ui.chat.commands import help_of, parse, spoken, written
from offspec.ui.chat.controller import Desk
from offspec.ui.chat.outcomes import Answer, Copy, Open, Outcome, Quit, Reload, Reset, Rewound, Say, Sources
from offspec.ui.chat.save_load import load, save, titled
from offspec.ui.chat.thinking import without_thinking

_HUB_ID = re.compile(r"[^./~][^/]*/[^/]+")
_SWITCH = {"on": True, "off": False}


def _help(desk: Desk, argument: str) -> Outcome:
    return Say(help_of(argument)) if argument else Open("help")


def _retry(desk: Desk, argument: str) -> Outcome:
    _check_turns(desk, 1)
    last = desk.session.messages[-1]
    dropped = (last,) if last.role == "assistant" else ()
    return Answer(desk.follow(desk.session.retry(trees=desk.setup.trees)), None, dropped)


def _edit(desk: Desk, argument: str) -> Outcome:
    _check_turns(desk, 1)
    if argument:
        question = spoken(argument)
        events = desk.session.edit(question, trees=desk.setup.trees)
        return Answer(desk.follow(events), question, desk.session.messages[_last_question(desk) :])
    dropped = desk.session.rewind(1)
    return Rewound(dropped, written(dropped[0].content))


def _last_question(desk: Desk) -> int:
    """Where it is in the messages."""
    return max(at for at, message in enumerate(desk.session.messages) if message.role == "user")


def _undo(desk: Desk, argument: str) -> Outcome:
    turns = _count(argument, "/undo 2 takes back the last two questions")
    _check_turns(desk, turns)
    return Rewound(desk.session.rewind(turns), None)


def _system(desk: Desk, argument: str) -> Outcome:
    session = desk.session
    if not argument:
        if not session.system:
            return Say("There is no system message; `/system Answer in one sentence.` sets one.")
        return Say(f"The system message, which `/system none` removes:\n\n{session.system}")
    session.system = None if argument.lower() == "none" else argument
    again = " It will read the whole conversation again, which begins differently now." * bool(
        session.messages
    )
    if session.system is None:
        return Say(f"No system message from the next answer on.{again}")
    return Say(f"The model is told so from the next answer on.{again}")


def _set(desk: Desk, argument: str) -> Outcome:
    params = desk.session.params
    if not argument:
        return Say(f"{settings.table(params)}\n\n`/set temperature=0.7` changes one.")
    if argument == "default":
        return _take_settings(desk, argument)
    if len(argument.split()) == 1 and "=" not in argument:
        name = settings.known(argument)
        return Say(f"`{name}` is `{settings.shown(params, name)}`: {settings.MEANINGS[name]}.")
    return _take_settings(desk, argument)


def _take_settings(desk: Desk, argument: str) -> Outcome:
    before, defaults = desk.session.params, desk.setup.params
    after = defaults if argument == "default" else settings.changed(before, argument, defaults)
    desk.session.params = after
    news = [
        f"`{name}` is `{settings.shown(after, name)}`"
        for name in settings.MEANINGS
        if getattr(before, name) != getattr(after, name)
    ]
    if not news:
        return Say("Nothing changes: it was set so already.")
    return Say(f"From the next answer on {', '.join(news)}.")


def _seed(desk: Desk, argument: str) -> Outcome:
    params = desk.session.params
    if argument:
        desk.session.params = replace(params, seed=settings.read_seed(argument))
        if desk.session.params.seed is None:
            return Say("A fresh seed is drawn for every answer.")
        return Say(f"The seed is {argument} from the next answer on; `/seed random` frees it again.")
    answered = [message.figures for message in desk.session.messages if message.figures]
    seeds = [figures.seed for figures in answered if figures.seed is not None]
    fixed = "A fresh seed is drawn for every answer" if params.seed is None else f"The seed is {params.seed}"
    last = f"; the last answer had {seeds[-1]}" if seeds else ""
    return Say(f"{fixed}{last}. `/seed 7` fixes it.")


def _sessions(desk: Desk, argument: str) -> Outcome:
    return Open("sessions")


def _draft(desk: Desk, argument: str) -> Outcome:
    if not argument:
        return Say(
            f"The draft is {desk.engine.draft}. `/draft MODEL` loads a small model or a head in its place, "
            "`/draft suffix` copies from the text, `/draft auto` takes the best there is, and `/draft none` "
            "goes on without."
        )
    names, loaded = read_drafts(argument), argument == desk.config.draft
    if loaded or set(names) <= set(desk.engine.sources):
        before = desk.engine.draft
        desk.engine.use(AUTO if loaded else argument)
        already = desk.engine.draft == before
        return Say(f"The draft is {desk.engine.draft} {'already' if already else 'from the next answer on'}.")
    for name in names:
        _check_model(name)
    return Reload(replace(desk.config, draft=argument, draft_bits=None))  # the bits were for the other


def _check_model(name: str) -> None:
    """Raises RequestError for what is plainly missing, before the model on the desk is given up for it."""
    if name in (*SOURCES, DEMO) or local_path(name)[1] or _HUB_ID.fullmatch(name):
        return
    raise RequestError(
        f"there is no model {name!r}: give a folder, a file, a hub id, or {', '.join(SOURCES)}"
    )


def _plan(desk: Desk, argument: str) -> Outcome:
    if desk.engine.plan is None:
        return Say("There is no plan: the budget and the width of trees were given, so none was made.")
    return Open("plan")


def _tree(desk: Desk, argument: str) -> Outcome:
    if not desk.trees:
        return Say("There is no tree yet. Ask something, and look again after the first pass.")
    return Open("tree")


def _sources(desk: Desk, argument: str) -> Outcome:
    if argument and argument not in _SWITCH:
        raise RequestError(f"/sources takes on or off, not {argument!r}")
    desk.sources = _SWITCH[argument] if argument else not desk.sources
    return Sources(desk.sources)


def _stats(desk: Desk, argument: str) -> Outcome:
    return Open("stats")


def _copy(desk: Desk, argument: str) -> Outcome:
    back = _count(argument, "/copy 2 copies the last answer but one")
    answers = [m for m in desk.session.messages if m.role == "assistant" and m.content.strip()]
    if not answers:
        raise RequestError("there is no answer yet that could be copied")
    if back > len(answers):
        raise RequestError(f"there are only {len(answers)} answers; /copy {len(answers)} copies the first")
    answer = answers[-back]
    what = "the last answer" if back == 1 else f"answer {len(answers) - back + 1} of {len(answers)}"
    return Copy(without_thinking(answer.content, answer.opened).strip("\n"), what)


def _clear(desk: Desk, argument: str) -> Outcome:
    left = desk.session.conversation
    name = left.id if not left.title or titled(desk, left.title) else left.title
    desk.begin_anew()
    if not left.turns:
        return Reset("A new conversation.")
    return Reset(f"A new conversation. `/load {name}` goes on with the one before.")


def _quit(desk: Desk, argument: str) -> Outcome:
    return Quit()


def _check_turns(desk: Desk, wanted: int) -> None:
    """Raises RequestError where fewer questions were asked."""
    turns = desk.session.conversation.turns
    if not turns:
        raise RequestError("nothing has been asked yet")
    if turns < wanted:
        asked = "one question has" if turns == 1 else f"{turns} questions have"
        raise RequestError(f"only {asked} been asked; /undo {turns} takes everything back")


def _count(argument: str, example: str) -> int:
    """How many, by default one. Raises RequestError."""
    if not argument:
        return 1
    digits = argument.lstrip("0") if argument.isascii() and argument.isdigit() else ""
    if not digits:
        raise RequestError(f"{argument!r} is no number above 0; {example}")
    return int(digits[:9])  # no conversation has more, and Python reads no more than 4300


ACTIONS: Mapping[str, Callable[[Desk, str], Outcome]] = {
    "help": _help,
    "retry": _retry,
    "edit": _edit,
    "undo": _undo,
    "system": _system,
    "set": _set,
    "seed": _seed,
    "save": save,
    "load": load,
    "sessions": _sessions,
    "draft": _draft,
    "plan": _plan,
    "tree": _tree,
    "sources": _sources,
    "stats": _stats,
    "copy": _copy,
    "clear": _clear,
    "quit": _quit,
}


def run_command(desk: Desk, line: str) -> Outcome:
    """Do what a line with a slash command says. Raises OffspecError; nothing has changed then."""
    desk.forget_completions()
    command, argument = parse(line)
    if desk.session.busy and not command.while_busy:
        raise RequestError("stop the answer first (Esc)")
    if argument and not command.takes_argument:
        raise RequestError(f"/{command.name} takes nothing after it")
    return ACTIONS[command.name](desk, argument)
