"""Handlers of the slash commands: from the chat and the command's argument to a CommandResult."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from offspec.chat.conversation import clean_title
from offspec.checkpoint.open import check_draft, nearest_source
from offspec.core.config import AUTO, NONE, SOURCES, SamplingParams, read_drafts
from offspec.core.errors import DiskFullError, ModelNotFoundError, RequestError, SessionError
from offspec.ui.chat import branch_commands, settings
from offspec.ui.chat.command_results import (
    CommandResult,
    CopyToClipboard,
    NewConversation,
    OpenView,
    Quit,
    Reload,
    ShowSources,
    ShowText,
)
from offspec.ui.chat.commands import command_help, find, parse
from offspec.ui.chat.controller import Attachment, ChatController
from offspec.ui.chat.reasoning import without_reasoning
from offspec.ui.chat.save_load import as_request_error, export, load, save, sessions_titled
from offspec_planners.units import format_bytes, format_count

_LONGEST = 64  # bytes per token of the context above which a file is too large to attach
_SWITCH = {"on": True, "off": False}


def _help(chat: ChatController, argument: str) -> CommandResult:
    return ShowText(help_page(argument, chat.session.params)) if argument else OpenView("help")


def help_page(name: str, params: SamplingParams) -> str:
    """Return the help of a command in Markdown; for /set with all parameters. Raises RequestError."""
    text = command_help(name)
    return f"{text}\n\n{settings.settings_table(params)}" if find(name).name == "set" else text


def _system(chat: ChatController, argument: str) -> CommandResult:
    session = chat.session
    if not argument:
        if not session.system:
            return ShowText("There is no system message; `/system Answer in one sentence.` sets one.")
        return ShowText(f"System message (`/system none` removes it):\n\n{session.system}")
    session.system = None if argument.lower() == "none" else argument
    again = " The next answer processes the whole conversation again." * bool(session.messages)
    if session.system is None:
        return ShowText(f"System message removed from the next answer on.{again}")
    return ShowText(f"System message set from the next answer on.{again}")


def _set(chat: ChatController, argument: str) -> CommandResult:
    before = chat.session.params
    after, news = settings.run_set(before, argument, chat.defaults)
    if after != before:
        chat.session.params = after
    return ShowText(news)


def _seed(chat: ChatController, argument: str) -> CommandResult:
    params = chat.session.params
    if argument:
        chat.session.params = replace(params, seed=settings.read_seed(argument))
        if chat.session.params.seed is None:
            return ShowText("A new seed is chosen for every answer.")
        return ShowText(
            f"The seed is {argument} from the next answer on; `/seed random` makes it random again."
        )
    answered = [message.figures for message in chat.session.messages if message.figures]
    seeds = [figures.seed for figures in answered if figures.seed is not None]
    fixed = "A new seed is chosen for every answer" if params.seed is None else f"The seed is {params.seed}"
    last = f"; the last answer used {seeds[-1]}" if seeds else ""
    return ShowText(f"{fixed}{last}. `/seed 7` sets it.")


def _draft(chat: ChatController, argument: str) -> CommandResult:
    if not argument:
        return ShowText(
            f"The draft is {chat.engine.draft}. `/draft MODEL` loads a draft model or a head instead, "
            "`/draft suffix` uses suffix lookup in the text, `/draft auto` the best available source, and "
            "`/draft none` disables speculation."
        )
    names = read_drafts(argument)
    loaded = names == chat.config.drafts
    if chat.is_open and (loaded or set(names) <= set(chat.engine.sources)):
        before = chat.engine.draft
        chat.use(AUTO if loaded else argument)
        already = chat.engine.draft == before
        return ShowText(
            f"The draft is {chat.engine.draft} {'already' if already else 'from the next answer on'}."
        )
    for name in names:
        _check_draft(name)
    chat.check_reload()
    return Reload(replace(chat.config, draft=argument, draft_bits=None))  # bits belong to the old draft


def _check_draft(name: str) -> None:
    """Raise RequestError for a draft that clearly does not exist, before the loaded model is closed."""
    try:
        check_draft(name)
    except ModelNotFoundError:
        near = nearest_source(name)
        valid = f"give a folder, a file, a Hugging Face id, or {', '.join(SOURCES)}"
        meant = f"did you mean {near}?" if near else valid
        raise RequestError(f"unknown draft {name!r}: {meant}") from None


def _plan(chat: ChatController, argument: str) -> CommandResult:
    if chat.engine.plan is None and chat.engine.draft == NONE:
        return ShowText("There is no plan, because without a draft there is no tree size to choose.")
    if chat.engine.plan is None:
        return ShowText("There is no plan, because --budget and --width were both given.")
    return OpenView("plan")


def _tree(chat: ChatController, argument: str) -> CommandResult:
    if not chat.trees:
        return ShowText("There is no tree yet. Ask a question, and try again after the first pass.")
    return OpenView("tree")


def _sources(chat: ChatController, argument: str) -> CommandResult:
    if argument and argument not in _SWITCH:
        raise RequestError(f"/sources takes on or off, not {argument!r}")
    chat.sources = _SWITCH[argument] if argument else not chat.sources
    return ShowSources(chat.sources)


def _attach(chat: ChatController, argument: str) -> CommandResult:
    """Attach a file to the next question, list the attachments, or remove them. Raises RequestError."""
    if not argument:
        return ShowText(_attached(chat) or "Nothing is attached; `/attach notes.txt` attaches a file.")
    if argument.lower() == "none":
        chat.attachments.clear()
        return ShowText("All attachments are removed.")
    with as_request_error(f"{clean_title(argument)} cannot be read"):
        file = Path(argument).expanduser()
        added = _attachment(file, chat)
    others = [other for other in chat.attachments if other.file != added.file]
    together, room = sum(other.tokens for other in others) + added.tokens, chat.session.context
    if together >= room:
        raise RequestError(
            f"{added.name} has {format_count(added.tokens, 'token')}, {together:,} with other attachments, "
            f"but the context holds only {room:,} including question and answer; attach a part of it, or "
            "restart with a larger --context"
        )
    chat.attachments[:] = [*others, added]
    return ShowText(_attached(chat))


def _attachment(file: Path, chat: ChatController) -> Attachment:
    """Read an attachment. Raises OSError, and RequestError if it is not text or clearly too long."""
    if file.is_dir():
        raise RequestError(f"{file} is a folder; attach the files in it one by one")
    if not file.exists():
        raise RequestError(f"the file {file} does not exist; check its name")
    if not file.is_file():
        raise RequestError(f"{file} is not a regular file; attach a text file")
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
            f"{file} is not UTF-8 text (byte {error.start:,}): attach a text file, or save it as UTF-8"
        ) from None
    if "\0" in text:
        raise RequestError(f"{file} is not text: it contains NUL bytes; attach a text file")
    if not text.strip():
        raise RequestError(f"{file} is empty; there is nothing to attach")
    text = text.replace("\r\n", "\n").rstrip()
    return Attachment(file.resolve(), clean_title(file.name), text, chat.session.count(text))


def _attached(chat: ChatController) -> str:
    lines = [
        f"- `{attachment.name}`, {format_count(attachment.tokens, 'token')}"
        for attachment in chat.attachments
    ]
    head = "Attached to the next question (`/attach none` removes all):"
    return "\n".join([head, "", *lines]) if lines else ""


def _copy(chat: ChatController, argument: str) -> CommandResult:
    if argument.split()[:1] == ["code"]:
        return _copy_code(chat, argument.removeprefix("code").strip())
    back = branch_commands.parse_count(argument, "/copy 2 copies the last answer but one")
    answers = [m for m in chat.session.messages if m.role == "assistant" and m.content.strip()]
    if not answers:
        raise RequestError("there is no answer to copy yet; ask a question first")
    if back > len(answers):
        raise RequestError(f"there are only {len(answers)} answers; /copy {len(answers)} copies the first")
    answer = answers[-back]
    what = "the last answer" if back == 1 else f"answer {len(answers) - back + 1} of {len(answers)}"
    return CopyToClipboard(without_reasoning(answer.content, answer.opened).strip("\n"), what)


class CodeBlock(NamedTuple):
    """Code block of an answer. language: name that the model gave it, or ""."""

    language: str
    code: str


def _copy_code(chat: ChatController, argument: str) -> CopyToClipboard:
    """Return the last block of code of the conversation, or the nth from the end.

    Raises RequestError if there are fewer.
    """
    back = branch_commands.parse_count(argument, "/copy code 2 copies the last block but one")
    answers = [m for m in chat.session.messages if m.role == "assistant"]
    blocks = [block for m in answers for block in code_blocks(without_reasoning(m.content, m.opened))]
    if not blocks:
        raise RequestError("no answer has a block of code yet; /copy copies the whole answer")
    if back > len(blocks):
        raise RequestError(
            f"there are only {len(blocks)} blocks of code; /copy code {len(blocks)} copies the first"
        )
    language, code = blocks[-back]
    lines = format_count(code.count("\n") + 1, "line")
    return CopyToClipboard(
        code, f"block {len(blocks) - back + 1} of {len(blocks)}, {lines} of {language or 'code'}"
    )


def code_blocks(markdown: str) -> list[CodeBlock]:
    """Return code blocks in order, without the final newline, so that pasted code does not run at once."""
    from markdown_it import MarkdownIt

    tokens = MarkdownIt("commonmark").parse(markdown)
    found = (token for token in tokens if token.type in ("fence", "code_block") and token.content.strip())
    return [CodeBlock(token.info.strip().partition(" ")[0], token.content.rstrip("\n")) for token in found]


def _clear(chat: ChatController, argument: str) -> CommandResult:
    left = chat.session.conversation
    name = left.id if not left.title or sessions_titled(chat, left.title) else left.title
    try:
        chat.new_conversation()
    except (DiskFullError, SessionError) as error:
        raise type(error)(f"{error}, or keep a copy elsewhere with `/save FILE`") from error
    if not left.turns:
        return NewConversation("New conversation.")
    return NewConversation(f"New conversation. `/load {name}` continues the previous one.")


ACTIONS: Mapping[str, Callable[[ChatController, str], CommandResult]] = {
    "help": _help,
    "retry": branch_commands.retry,
    "edit": branch_commands.edit,
    "undo": branch_commands.undo,
    "branch": branch_commands.branch,
    "attach": _attach,
    "system": _system,
    "set": _set,
    "seed": _seed,
    "save": save,
    "load": load,
    "export": export,
    "sessions": lambda *_: OpenView("sessions"),
    "draft": _draft,
    "plan": _plan,
    "tree": _tree,
    "sources": _sources,
    "stats": lambda *_: OpenView("stats"),
    "copy": _copy,
    "clear": _clear,
    "quit": lambda *_: Quit(),
}


def run_command(chat: ChatController, line: str) -> CommandResult:
    """Run a slash command. Raises OffspecError without having changed anything."""
    chat.forget_completions()
    command, argument = parse(line)
    if chat.session.busy and not command.while_busy:
        raise RequestError(f"/{command.name} cannot run during an answer; stop the answer first (Esc)")
    if argument and not command.takes_argument:
        raise RequestError(f"/{command.name} takes no argument; omit {argument!r}")
    return ACTIONS[command.name](chat, argument)
