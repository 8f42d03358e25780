"""The slash commands of a chat: names, arguments and help texts."""

import re
from dataclasses import dataclass
from difflib import get_close_matches

from offspec.core.errors import RequestError
from offspec.ui.chat.settings import parameter_name

_NAMED = re.compile(r"/([A-Za-z][A-Za-z0-9_-]*)(?:\s+|$)")
_BEGUN = re.compile(r"/+([A-Za-z]+)(?:\s|$)")
_ALIASES = {"exit": "quit", "new": "clear"}  # names that other programs use


@dataclass(frozen=True, slots=True)
class Command:
    """A slash command.

    usage: syntax, with optional parts in brackets. help: one line of Markdown. details: further help, a
    paragraph whose newlines are ignored. while_busy: whether it may run during an answer.
    """

    name: str
    usage: str
    help: str
    details: str = ""
    while_busy: bool = False

    @property
    def takes_argument(self) -> bool:
        return " " in self.usage


_LIST = (
    Command(
        "help",
        "/help [command]",
        "Explain all commands, or one of them.",
        """`/help set` lists all parameters. To ask a question that begins with the name of a command, write
two slashes: `//help` asks the model about `/help`.""",
        while_busy=True,
    ),
    Command(
        "retry",
        "/retry [temperature]",
        "Answer the last question again.",
        """The previous answer is kept: `/undo` or ← in an empty input brings it back. Only the answer is
computed again; the question stays in the KV cache. A fixed seed increases by one. At temperature 0 the answer
would be the same unless something else changed, so `/retry 0.7` answers once at temperature 0.7. Also use
`/retry` to continue after an error or a stop.""",
    ),
    Command(
        "edit",
        "/edit [text]",
        "Edit the last question.",
        """`/edit TEXT` replaces the last question. Without a text, the last question is put into the input
for you to edit and send; Esc cancels. The previous version is kept: `/undo` or ← in an empty input brings it
back. Earlier turns stay in the KV cache and are not computed again.""",
    ),
    Command(
        "undo",
        "/undo [n]",
        "Undo the last retry or edit; otherwise remove the last question.",
        """After a retry or an edit, the previous version is shown again, and the later one is kept: `/branch`
lists both. `/undo 1` removes the last question and `/undo 2` the last two, with their answers and all
versions. The remaining turns stay in the KV cache and are not computed again.""",
    ),
    Command(
        "branch",
        "/branch [n] [question]",
        "List the versions created by retries and edits, or show one.",
        """`/branch 2` shows the second version of the last question that has several, and everything after
it; `/branch 2 1` shows the second version of the first question. In the terminal UI, ← and → switch versions
while the input is empty. All versions are saved.""",
    ),
    Command(
        "attach",
        "/attach [file|none]",
        "Send a text file with the next question.",
        """The file is appended to the question as a block with its name. Attach several files one by one.
Without an argument, the command lists them; `/attach none` removes them all. Files must be UTF-8 text and fit
in the context.""",
    ),
    Command(
        "system",
        "/system [text|none]",
        "Show, set or remove the system message.",
        """The system message precedes all questions and instructs the model: `/system Answer in one
sentence.` Since it changes the beginning of the conversation, the next answer computes the whole conversation
again.""",
    ),
    Command(
        "set",
        "/set [name=value ...]",
        "Show or change the sampling parameters.",
        """`/set` lists all parameters with their values and meanings; `/set temperature=0.7 top_p=0.9`
changes two at once, from the next answer on. The value `default` restores the one that the chat started with.
Put stop texts with spaces in quotes; `\\n` is a new line, and `stop=none` removes all: `/set stop="The end"
stop="\\n\\n"`.""",
        while_busy=True,
    ),
    Command(
        "seed",
        "/seed [n|random]",
        "Show or set the seed, or make it random.",
        """The same seed, question and settings give the same answer with any draft. Without an argument, the
command shows the seed of the last answer, which you can then set. `/seed random` chooses a new seed for every
answer. At temperature 0 the seed has no effect.""",
        while_busy=True,
    ),
    Command(
        "save",
        "/save [name or file]",
        "Name the conversation, or write a copy to a file.",
        """Conversations are saved automatically. `/save holiday plans` names this one, and
`/load holiday plans` finds it. `/save ./plans.json` writes a copy of its current state; an argument that
contains a slash or ends in .json is a file.""",
        while_busy=True,
    ),
    Command(
        "load",
        "/load [name]",
        "Continue another conversation.",
        """Give its name, the beginning of its id, or a file. The current conversation is saved. The next
question makes the model read the other one from its beginning. Without an argument, the command lists
all.""",
    ),
    Command(
        "export",
        "/export file.md",
        "Write the conversation to a Markdown file.",
        """The file has questions and answers as shown, without reasoning and other versions. Exporting to the
same file again replaces it; a file with other content is never overwritten.""",
        while_busy=True,
    ),
    Command(
        "sessions",
        "/sessions",
        "List the saved conversations.",
        while_busy=True,
    ),
    Command(
        "draft",
        "/draft [name,...|auto|none]",
        "Show or change the draft sources.",
        """Give a draft model or a trained head, `self` (the quantized target, a self-draft), `suffix`
(suffix lookup in the text), several of them separated by commas, `auto` (the best available), or `none`. The
answers are the same with any of them; only the speed differs. Loaded sources and `suffix` are used at once;
for others the model is loaded again, and the conversation continues.""",
    ),
    Command(
        "plan",
        "/plan",
        "Explain placement, tree size, and the bottleneck.",
        while_busy=True,
    ),
    Command(
        "tree",
        "/tree",
        "Show the last token tree and the accepted path.",
        """Each node is a draft token with its probability. One pass of the target verifies the whole tree;
the highlighted path was accepted, and the token after it is the bonus token.""",
        while_busy=True,
    ),
    Command(
        "sources",
        "/sources [on|off]",
        "Highlight the source of each token in the answers.",
        """A draft token was proposed by the draft and accepted. A bonus token is the token that the target
adds at the end of every pass; without a draft, all tokens are bonus tokens.""",
        while_busy=True,
    ),
    Command(
        "stats",
        "/stats",
        "Show speed, tokens per pass, and the time spent on each part of a pass.",
        while_busy=True,
    ),
    Command(
        "copy",
        "/copy [code] [n]",
        "Copy the last answer, or the last block of code, to the clipboard.",
        """`/copy 2` copies the last answer but one, without its reasoning; `/copy code` copies the last block
of code, and `/copy code 2` the one before. This also works over ssh if the terminal supports OSC 52, as most
do.""",
        while_busy=True,
    ),
    Command(
        "clear",
        "/clear",
        "Begin a new conversation, with the same system message and settings.",
        "The current conversation is saved; `/sessions` lists it.",
    ),
    Command(
        "quit",
        "/quit",
        "Exit. The conversation is saved; `offspec chat MODEL --resume` continues it.",
        while_busy=True,
    ),
)

COMMANDS: dict[str, Command] = {command.name: command for command in _LIST}


def is_command(line: str) -> bool:
    """Return whether a line begins with a slash and the name of a command, known or unknown.

    Names begin with a letter and have letters, digits, `-` and `_`, so `/usr/bin` and `/2` are questions.
    """
    return _NAMED.match(line) is not None


def parse(line: str) -> tuple[Command, str]:
    """Return the command of a line and its stripped argument. Raises RequestError."""
    match = _NAMED.match(line)
    if match is None:
        raise RequestError("not a command; a command is a slash and a name, such as /help")
    argument = line[match.end() :].strip()
    return find(match[1], argument), argument


def find(name: str, argument: str = "") -> Command:
    """Return the command of a name, with or without slash. Raises RequestError with the nearest command."""
    name = name.removeprefix("/").lower()
    name = _ALIASES.get(name, name)
    if name in COMMANDS:
        return COMMANDS[name]
    near = _nearest(name, argument)
    meant = f"did you mean {near}?" if near else "see /help."
    raise RequestError(
        f"unknown command /{name}; {meant} To send it to the model, start the line with a space"
    )


def _nearest(name: str, argument: str) -> str | None:
    """Return the command that an unknown one probably means; for a parameter, the line that sets it."""
    parameter = parameter_name(name)
    if parameter is not None:
        return f"/set {parameter} {argument}".rstrip() if len(argument.split()) < 2 else f"/set {parameter}"
    near = get_close_matches(name, [*COMMANDS, *_ALIASES], n=1)
    return f"/{near[0]}" if near else None


def unescaped(text: str) -> str:
    """Return the question that a line stands for: `//help` becomes `/help`, `//TODO` stays."""
    return text[1:] if text.startswith("//") and _begins_as_command(text) else text


def escaped(text: str) -> str:
    """Return the line that stands for a question, the inverse of `unescaped`."""
    return f"/{text}" if _begins_as_command(text) else text


def _begins_as_command(text: str) -> bool:
    """Return whether a text begins with slashes and the name of a command."""
    match = _BEGUN.match(text)
    return match is not None and (match[1].lower() in COMMANDS or match[1].lower() in _ALIASES)


def command_help(name: str) -> str:
    """Return the help of a command in Markdown. Raises RequestError for an unknown one."""
    command = find(name)
    more = command.details.replace("\n", " ")
    return "\n\n".join(filter(None, (f"**`{command.usage}`**", command.help, more)))
