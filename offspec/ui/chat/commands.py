"""The slash commands of a chat: names, arguments and help texts."""

import re
from dataclasses import dataclass
from difflib import get_close_matches

from offspec.core.errors import RequestError

_NAMED = re.compile(r"/([A-Za-z]+)(?:\s+|$)")
_BEGUN = re.compile(r"/+([A-Za-z]+)(?:\s|$)")
_ALIASES = {"exit": "quit", "new": "clear"}  # names that other programs use


@dataclass(frozen=True, slots=True)
class Command:
    """A command as the user knows it.

    usage: as typed, with what is optional in brackets. help: one line of Markdown. more: further
    help, a paragraph whose newlines mean nothing. while_busy: whether it may run while an answer is
    under way.
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
        """`/help set` lists all that can be set. A question that begins with the name of a command is written
with two slashes: `//help` asks the model about `/help`.""",
        while_busy=True,
    ),
    Command(
        "retry",
        "/retry [temperature]",
        "Answer the last question again.",
        """The previous answer is kept beside the new one: `/undo` brings it back, and so does ← in an empty
input. Only the answer is computed again; the question stays in the caches. A fixed seed increases by one.
At temperature 0 the answer would be the same unless something else changed, so `/retry 0.7` answers at
temperature 0.7, this once. Use it too to continue after an error or a stop.""",
    ),
    Command(
        "edit",
        "/edit [text]",
        "Ask the last question differently.",
        """With a text, that text takes the place of the last question. Alone, the last question is put into
the input, to change and send; Esc leaves all as it was. What it replaces is kept beside it: `/undo` brings
it back, and so does ← in an empty input. Earlier turns stay in the caches and are not computed
again.""",
    ),
    Command(
        "undo",
        "/undo [n]",
        "Take the last retry or edit back, else the last question.",
        """After a retry or an edit, the version before is shown again, and the later one is kept: `/branch`
lists both. `/undo 1` and `/undo 2` remove the last question, or the last two, with their answers and all
their versions. The turns that remain stay in the caches and are not computed again.""",
    ),
    Command(
        "branch",
        "/branch [n] [question]",
        "List the versions that retries and edits made, or show one.",
        """`/branch 2` shows the second version of the last question that has several, with what followed it;
`/branch 2 1` that of the first question. In the terminal UI, ← and → go through them while the input is
empty. All are saved.""",
    ),
    Command(
        "attach",
        "/attach [file|none]",
        "Send a text file with the next question.",
        """It goes behind the question, as a block with its name. Several files are attached one by one.
Alone, the command lists them, and `/attach none` removes them all. What is no text in UTF-8 is refused,
and what has more tokens than the context.""",
    ),
    Command(
        "system",
        "/system [text|none]",
        "Show, set or remove the system message.",
        """It comes before all questions and tells the model how to answer: `/system Answer in one sentence.`
Because the conversation then begins differently, the next answer computes all of it again.""",
    ),
    Command(
        "set",
        "/set [name=value ...]",
        "Show or change the sampling parameters.",
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
        """The same seed, question and settings give the same answer, whatever the draft. Alone, it shows
the seed of the last answer, so that you can fix it. `/seed random` chooses a new one for every answer. At
temperature 0 the seed has no effect.""",
        while_busy=True,
    ),
    Command(
        "save",
        "/save [name or file]",
        "Name the conversation, or write a copy to a file.",
        """Conversations are saved automatically. `/save holiday plans` names this one, and
`/load holiday plans` finds it. `/save ./plans.json` writes a copy as it is now; anything with
a slash, or that ends in .json, is a file.""",
        while_busy=True,
    ),
    Command(
        "load",
        "/load [name]",
        "Continue another conversation.",
        """By its name, the beginning of its id, or a file. The current one is saved. The next question makes
the model read the other one from its beginning. Alone, the command lists them.""",
    ),
    Command(
        "export",
        "/export file.md",
        "Write the conversation to a Markdown file.",
        """Questions and answers as they are shown, without thinking and without other versions. The same file
is written anew each time; one that holds something else is kept, and another name is asked for.""",
        while_busy=True,
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
        "Show or change the draft sources.",
        """A small model or a trained head, `substitute` (a copy of the target in few bits), `suffix` (which
copies from the text), several of them with commas between, `auto` (the best available), or `none`. The
answers are the same with any of them; only the speed differs. Sources that are loaded, and `suffix`, are
used at once; for others the model is loaded again, and the conversation continues.""",
    ),
    Command(
        "plan",
        "/plan",
        "Explain placement, tree size, and what bounds the speed.",
        while_busy=True,
    ),
    Command(
        "tree",
        "/tree",
        "Show the last token tree and the accepted path.",
        """Each node is a draft token with its probability. One pass of the target verifies all of them; the
highlighted path was accepted, and the token after it is the bonus token.""",
        while_busy=True,
    ),
    Command(
        "sources",
        "/sources [on|off]",
        "Mark where each token of the answers came from.",
        """A draft token was proposed and accepted. A bonus token is the one that the target adds at the end
of every pass; without a draft all tokens are of that kind.""",
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
        "/copy [code] [n]",
        "Copy the last answer, or the last block of code, to the clipboard.",
        """`/copy 2` copies the last answer but one, without its thinking; `/copy code` copies the last block
of code, and `/copy code 2` the one before. It works over ssh too, if the terminal knows OSC 52, as most
do.""",
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
        "Leave. The conversation is saved; `offspec chat MODEL --resume` continues it.",
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
    more = command.more.replace("\n", " ")
    return "\n\n".join(filter(None, (f"**`{command.usage}`**", command.help, more)))
