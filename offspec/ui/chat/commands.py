"""The slash commands of a chat: their names, what they take, and what the user is told of them."""

import re
from dataclasses import dataclass
from difflib import get_close_matches

from offspec.core.errors import RequestError

_NAMED = re.compile(r"/([A-Za-z]+)(?:\s+|$)")
_BEGUN = re.compile(r"/+([A-Za-z]+)(?:\s|$)")
_ALIASES = {"exit": "quit", "new": "clear"}  # what other programs taught people's fingers


@dataclass(frozen=True, slots=True)
class Command:
    """A command as the user knows it.

    usage: as typed, with what is optional in brackets. help: one line of Markdown. more: what there is to
    know beyond it. while_busy: whether it may run while an answer is under way.
    """

    name: str
    usage: str
    help: str
    more: str = ""
    while_busy: bool = False

    @property
    def takes_argument(self) -> bool:
        return " " in self.usage


_LIST = (
    Command(
        "help",
        "/help [command]",
        "Explain all commands, or one of them.",
        """`/help set` tells what can be set. A question that begins with the name of a command is written
with two slashes: `//help` asks the model about `/help`.""",
        while_busy=True,
    ),
    Command(
        "retry",
        "/retry",
        "Answer the last question again.",
        """The answer that was there is dropped. Only the answer is computed anew: the question stays in the
caches. A fixed seed moves on by one; at temperature 0 the same answer comes again, unless something else
changed, so try `/set temperature=0.7` first. After a fault or a stop this is how to go on.""",
    ),
    Command(
        "edit",
        "/edit [text]",
        "Ask the last question differently.",
        """With a text, that is asked in place of the last question, whose answer is dropped. Alone, it
hands the last question back to you, to change and send. What was said before stays in the caches and costs
nothing.""",
    ),
    Command(
        "undo",
        "/undo [n]",
        "Take back the last question and its answer, or the last n.",
        """The conversation goes on from where it was before. What remains stays in the caches and costs
nothing.""",
    ),
    Command(
        "system",
        "/system [text|none]",
        "Show, set or remove the system message.",
        """It goes before everything that is said, and tells the model how to answer: `/system Answer in one
sentence.` Because the conversation then begins differently, the next answer reads all of it again.""",
    ),
    Command(
        "set",
        "/set [name=value ...]",
        "Show or change how answers are chosen.",
        """`/set` lists everything with its value and what it means; `/set temperature=0.7 top_p=0.9`
changes two at once, from the next answer on. `default` as a value takes what the chat began with. Stop
texts with spaces go in quotes, `\\n` is a new line, and `stop=none` removes them all: `/set stop="The end"
stop="\\n\\n"`.""",
        while_busy=True,
    ),
    Command(
        "seed",
        "/seed [n|random]",
        "Show, fix or free the seed.",
        """The same seed, question and settings give the same answer, whatever the draft. Alone, it tells
the seed of the last answer, so that you can fix it. `/seed random` draws a fresh one for every answer. At
temperature 0 no dice are thrown, and the seed plays no part.""",
        while_busy=True,
    ),
    Command(
        "save",
        "/save [name or file]",
        "Name the conversation, or write a copy to a file.",
        """Conversations are saved as they go; nothing has to be done for it. `/save holiday plans` names
this one, and `/load holiday plans` finds it. `/save ./plans.json` writes a copy as it is now; anything with
a slash, or that ends in .json, is a file.""",
        while_busy=True,
    ),
    Command(
        "load",
        "/load [name]",
        "Go on with another conversation.",
        """By its name, the beginning of its id, or a file. The one you leave is saved. The model reads the
other one from its beginning when you next ask something. Alone, the command lists them.""",
    ),
    Command(
        "sessions",
        "/sessions",
        "List the conversations that are saved.",
        while_busy=True,
    ),
    Command(
        "draft",
        "/draft [name,...|auto|none]",
        "Show or change who guesses ahead.",
        """A small model or a trained head, `substitute` (a copy of the target in few bits), `suffix` (which
copies from the text), several of them with commas between, `auto` (the best there is), or `none`. The answers
are the same with any of them; only the speed differs. What is loaded already, and `suffix`, takes over at
once; for anything else the model is loaded again, and the conversation goes on.""",
    ),
    Command(
        "plan",
        "/plan",
        "Explain what lies where, how large trees are, and what bounds the speed.",
        while_busy=True,
    ),
    Command(
        "tree",
        "/tree",
        "Show the last tree of guesses and the path that the target took.",
        """Each node is a guess with its probability. One pass of the weights checks all of them at once;
the lit path became text, and the token after it is the target's own.""",
        while_busy=True,
    ),
    Command(
        "sources",
        "/sources [on|off]",
        "Mark where each token of the answers came from.",
        """A draft token was guessed and found right. A bonus token is the one that the target adds by
itself at the end of every pass; without a draft all are of that kind.""",
        while_busy=True,
    ),
    Command(
        "stats",
        "/stats",
        "Show speed, tokens per pass, and where the time of a pass goes.",
        while_busy=True,
    ),
    Command(
        "copy",
        "/copy [n]",
        "Copy the last answer to the clipboard, or the n-th last.",
        "Without its thinking. Over ssh too, where the terminal knows OSC 52, as most do.",
        while_busy=True,
    ),
    Command(
        "clear",
        "/clear",
        "Begin a new conversation, with the same system message and settings.",
        "The one before is saved; `/sessions` lists it.",
    ),
    Command(
        "quit",
        "/quit",
        "Leave. Everything said is saved; `offspec chat MODEL --resume` goes on with it.",
        while_busy=True,
    ),
)

COMMANDS: dict[str, Command] = {command.name: command for command in _LIST}


def is_command(line: str) -> bool:
    """Whether it begins with a slash and a word of letters alone: `/usr/bin` is something to say."""
    return _NAMED.match(line) is not None


def parse(line: str) -> tuple[Command, str]:
    """The command of such a line, and the rest without space around it. Raises RequestError."""
    match = _NAMED.match(line)
    if match is None:
        raise RequestError("a command is a slash and a name, such as /help")
    return find(match[1]), line[match.end() :].strip()


def find(name: str) -> Command:
    """The command of a name, with or without its slash. Raises RequestError with the nearest name."""
    name = name.removeprefix("/").lower()
    name = _ALIASES.get(name, name)
    if name in COMMANDS:
        return COMMANDS[name]
    near = get_close_matches(name, [*COMMANDS, *_ALIASES], n=1)
    meant = f"the nearest is /{near[0]}" if near else "/help lists them all"
    raise RequestError(f"there is no command /{name}; {meant}, and a space before it says it to the model")


def unescaped(text: str) -> str:
    """What is said to the model where this was written: `//help` is said as `/help`, `//TODO` as it is."""
    return text[1:] if text.startswith("//") and _begins_as_command(text) else text


def escaped(text: str) -> str:
    """How a question is written so that it is said and not run: what `unescaped` takes away, put back."""
    return f"/{text}" if _begins_as_command(text) else text


def _begins_as_command(text: str) -> bool:
    """Whether the name of a command stands at its beginning, after any number of slashes."""
    match = _BEGUN.match(text)
    return match is not None and (match[1].lower() in COMMANDS or match[1].lower() in _ALIASES)


def help_of(name: str) -> str:
    """One command in Markdown. Raises RequestError for an unknown one."""
    command = find(name)
    return "\n\n".join(filter(None, (f"**`{command.usage}`**", command.help, command.more)))
