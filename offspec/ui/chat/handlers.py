"""What the commands do: each takes the chat and what was typed after the name, and says what came of it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from offspec.chat.conversation import clean_title
from offspec.checkpoint.hub_name import hub_name
from offspec.checkpoint.open import DEMO, DEMO_WIDE, local_path
from offspec.core.config import AUTO, NONE, SOURCES, SamplingParams, read_drafts
from offspec.core.errors import DiskFullError, RequestError, SessionError
from offspec.ui.chat import settings, versions
from offspec.ui.chat.commands import find, help_of, parse
from offspec.ui.chat.controller import Attachment, ChatController
from offspec.ui.chat.outcomes import (
    Copy,
    OpenView,
    Outcome,
    Quit,
    Reload,
    Reset,
    ShowSources,
    ShowText,
)
from offspec.ui.chat.save_load import as_request_error, export, load, others_titled, save
from offspec.ui.chat.thinking import without_thinking
from offspec_planners.units import format_bytes, format_count

_LONGEST = 64  # bytes that a token may have; a file of more for each token of the context is not attached
_SWITCH = {"on": True, "off": False}


def _help(chat: ChatController, argument: str) -> Outcome:
    return ShowText(help_page(argument, chat.session.params)) if argument else OpenView("help")


def help_page(name: str, params: SamplingParams) -> str:
    """One command in Markdown, of /set with all that can be set. Raises RequestError for an unknown one."""
    text = help_of(name)
    return f"{text}\n\n{settings.table(params)}" if find(name).name == "set" else text


def _system(chat: ChatController, argument: str) -> Outcome:
    session = chat.session
    if not argument:
        if not session.system:
            return ShowText("There is no system message; `/system Answer in one sentence.` sets one.")
        return ShowText(f"The system message, which `/system none` removes:\n\n{session.system}")
    session.system = None if argument.lower() == "none" else argument
    again = " It will read the whole conversation again, which begins differently now." * bool(
        session.messages
    )
    if session.system is None:
        return ShowText(f"No system message from the next answer on.{again}")
    return ShowText(f"It applies from the next answer on.{again}")


def _set(chat: ChatController, argument: str) -> Outcome:
    before = chat.session.params
    after, news = settings.run_set(before, argument, chat.defaults)
    if after != before:
        chat.session.params = after
    return ShowText(news)


def _seed(chat: ChatController, argument: str) -> Outcome:
    params = chat.session.params
    if argument:
        chat.session.params = replace(params, seed=settings.read_seed(argument))
        if chat.session.params.seed is None:
            return ShowText("A new seed is chosen for every answer.")
        return ShowText(f"The seed is {argument} from the next answer on; `/seed random` undoes that.")
    answered = [message.figures for message in chat.session.messages if message.figures]
    seeds = [figures.seed for figures in answered if figures.seed is not None]
    fixed = "A new seed is chosen for every answer" if params.seed is None else f"The seed is {params.seed}"
    last = f"; the last answer had {seeds[-1]}" if seeds else ""
    return ShowText(f"{fixed}{last}. `/seed 7` fixes it.")


def _draft(chat: ChatController, argument: str) -> Outcome:
    if not argument:
        return ShowText(
            f"The draft is {chat.engine.draft}. `/draft MODEL` loads a small model or a head in its place, "
            "`/draft suffix` copies from the text, `/draft auto` takes the best available, and `/draft none` "
            "goes on without."
        )
    names, loaded = read_drafts(argument), argument == chat.config.draft
    if chat.is_open and (loaded or set(names) <= set(chat.engine.sources)):
        before = chat.engine.draft
        chat.use(AUTO if loaded else argument)
        already = chat.engine.draft == before
        return ShowText(
            f"The draft is {chat.engine.draft} {'already' if already else 'from the next answer on'}."
        )
    for name in names:
        _check_model(name)
    chat.check_reload()
    return Reload(replace(chat.config, draft=argument, draft_bits=None))  # the bits were for the other


def _check_model(name: str) -> None:
    """Raises RequestError for what is plainly missing, before the loaded model is given up for it."""
    if name in (*SOURCES, DEMO, DEMO_WIDE) or local_path(name)[1] or hub_name(name):
        return
    raise RequestError(
        f"there is no model {name!r}: give a folder, a file, a hub id, or {', '.join(SOURCES)}"
    )


def _plan(chat: ChatController, argument: str) -> Outcome:
    if chat.engine.plan is None and chat.engine.draft == NONE:
        return ShowText("There is no plan: without a draft there are no trees whose size it would choose.")
    if chat.engine.plan is None:
        return ShowText("There is no plan: the budget and the width of trees were given, so none was made.")
    return OpenView("plan")


def _tree(chat: ChatController, argument: str) -> Outcome:
    if not chat.trees:
        return ShowText("There is no tree yet. Ask something, and look again after the first pass.")
    return OpenView("tree")


def _sources(chat: ChatController, argument: str) -> Outcome:
    if argument and argument not in _SWITCH:
        raise RequestError(f"/sources takes on or off, not {argument!r}")
    chat.sources = _SWITCH[argument] if argument else not chat.sources
    return ShowSources(chat.sources)


def _attach(chat: ChatController, argument: str) -> Outcome:
    """One more file for the next question, what there is already, or none. Raises RequestError."""
    if not argument:
        return ShowText(_attached(chat) or "Nothing is attached; `/attach notes.txt` attaches a file.")
    if argument.lower() == "none":
        chat.attached.clear()
        return ShowText("The next question goes without files.")
    with as_request_error(f"{clean_title(argument)} cannot be read"):
        file = Path(argument).expanduser()
        added = _attachment(file, chat)
    others = [other for other in chat.attached if other.file != added.file]
    together, room = sum(other.tokens for other in others) + added.tokens, chat.session.context
    if together >= room:
        raise RequestError(
            f"{added.name} has {format_count(added.tokens, 'token')}, {together:,} with what is attached, "
            f"and the context has room for {room:,} with question and answer; attach a part of it, or "
            "load with a larger --context"
        )
    chat.attached[:] = [*others, added]
    return ShowText(_attached(chat))


def _attachment(file: Path, chat: ChatController) -> Attachment:
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


def _attached(chat: ChatController) -> str:
    lines = [
        f"- `{attachment.name}`, {format_count(attachment.tokens, 'token')}" for attachment in chat.attached
    ]
    goes = "This goes" if len(lines) == 1 else "These go"
    head = f"{goes} with the next question; `/attach none` removes what is attached:"
    return "\n".join([head, "", *lines]) if lines else ""


def _copy(chat: ChatController, argument: str) -> Outcome:
    if argument.split()[:1] == ["code"]:
        return _copy_code(chat, argument.removeprefix("code").strip())
    back = versions.count(argument, "/copy 2 copies the last answer but one")
    answers = [m for m in chat.session.messages if m.role == "assistant" and m.content.strip()]
    if not answers:
        raise RequestError("there is no answer yet that could be copied")
    if back > len(answers):
        raise RequestError(f"there are only {len(answers)} answers; /copy {len(answers)} copies the first")
    answer = answers[-back]
    what = "the last answer" if back == 1 else f"answer {len(answers) - back + 1} of {len(answers)}"
    return Copy(without_thinking(answer.content, answer.opened).strip("\n"), what)


class CodeBlock(NamedTuple):
    """language: as the model named it, or ""."""

    language: str
    code: str


def _copy_code(chat: ChatController, argument: str) -> Copy:
    """Return the last block of code of the conversation, or the one that many from the end.

    Raises RequestError if there are fewer.
    """
    back = versions.count(argument, "/copy code 2 copies the last block but one")
    answers = [m for m in chat.session.messages if m.role == "assistant"]
    blocks = [block for m in answers for block in code_blocks(without_thinking(m.content, m.opened))]
    if not blocks:
        raise RequestError("there is no block of code in the answers yet")
    if back > len(blocks):
        raise RequestError(
            f"there are only {len(blocks)} blocks of code; /copy code {len(blocks)} copies the first"
        )
    language, code = blocks[-back]
    lines = format_count(code.count("\n") + 1, "line")
    return Copy(code, f"block {len(blocks) - back + 1} of {len(blocks)}, {lines} of {language or 'code'}")


def code_blocks(markdown: str) -> list[CodeBlock]:
    """Blocks of code in their order, each without the end of its last line: pasted, it does not run yet."""
    from markdown_it import MarkdownIt

    tokens = MarkdownIt("commonmark").parse(markdown)
    found = (token for token in tokens if token.type in ("fence", "code_block") and token.content.strip())
    return [CodeBlock(token.info.strip().partition(" ")[0], token.content.rstrip("\n")) for token in found]


def _clear(chat: ChatController, argument: str) -> Outcome:
    left = chat.session.conversation
    name = left.id if not left.title or others_titled(chat, left.title) else left.title
    try:
        chat.new_conversation()
    except (DiskFullError, SessionError) as error:
        raise type(error)(f"{error}, or keep a copy elsewhere with `/save FILE`") from error
    if not left.turns:
        return Reset("A new conversation.")
    return Reset(f"A new conversation. `/load {name}` continues the one before.")


ACTIONS: Mapping[str, Callable[[ChatController, str], Outcome]] = {
    "help": _help,
    "retry": versions.retry,
    "edit": versions.edit,
    "undo": versions.undo,
    "branch": versions.branch,
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


def run_command(chat: ChatController, line: str) -> Outcome:
    """Do what a line with a slash command says. Raises OffspecError; nothing has changed then."""
    chat.forget_completions()
    command, argument = parse(line)
    if chat.session.busy and not command.while_busy:
        raise RequestError("stop the answer first (Esc)")
    if argument and not command.takes_argument:
        raise RequestError(f"/{command.name} takes nothing after it")
    return ACTIONS[command.name](chat, argument)
