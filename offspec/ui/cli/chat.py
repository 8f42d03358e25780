"""`offspec chat`: hold a conversation, in the terminal UI or in line mode."""

import os
import sys
from typing import Annotated, Literal

import typer

from offspec.core.config import SamplingParams
from offspec.core.errors import RequestError, SessionError
from offspec.ui.chat.setup import ChatSetup, open_engine, restart_command
from offspec.ui.cli import checks, completion
from offspec.ui.cli import options as opt

EPILOG = """[bold]Examples[/]

Chat with the demo model:

  offspec chat demo

A large model with a small draft model; then resume the conversation later:

  offspec chat ./Qwen3-32B --draft ./Qwen3-0.6B --temperature 0.7

  offspec chat ./Qwen3-32B --draft ./Qwen3-0.6B --resume

A question from a pipe, in a named conversation (name it with [bold]/save shopping[/]):

  echo "And for six people?" | offspec chat demo --session shopping > answer.txt

In the chat, [bold]/help[/] lists the commands, and Esc stops an answer (Ctrl-C in line mode).
Conversations are saved continuously, each in a file under ~/.local/share/offspec, or $OFFSPEC_DATA.
"""


@opt.takes_options
def chat(
    ctx: typer.Context,
    options: opt.Options,
    system: str | None = None,
    resume: bool = False,
    session: Annotated[str | None, typer.Option(autocompletion=completion.sessions)] = None,
    max_tokens: int = 2048,
    stop: list[str] | None = None,
    plain: bool = False,
    notify: Literal["on", "off"] = "on",
    quiet: bool = False,
) -> None:
    """Chat with a model. The KV cache keeps the conversation, so only new tokens are processed.

    Prompt and output:
        system (TEXT): System message before the conversation.
        resume: Continue the latest conversation with this model.
        session (NAME): Conversation to continue: its name, the beginning of its id, or its file.
        plain: Use line mode: questions from standard input, answers on standard output. This is the default
            if either is a pipe or a file.
        notify: Ring the terminal's bell after answers that took over 10 s, and show a desktop notification
            (OSC 9) if another window has the focus. Not in line mode.
        quiet: Suppress progress, notices and statistics on stderr.
    """
    if session is not None and resume:
        raise RequestError("--session NAME already continues that conversation; omit --resume")
    if session is not None and not session.strip():
        raise RequestError("--session needs a name; --resume continues the latest conversation")
    setup = ChatSetup(
        config=options.config(converses=True),
        sampling=options.overrides(max_tokens=max_tokens, stop=stop or ()),
        system=system,
        plan=options.plan,
        resume="" if resume else session,
        overrides=_given(ctx, options),
        command=restart_command(sys.argv),
        notify=notify == "on",
    )
    checks.check_files(setup.config, setup.plan)
    _begin(setup, plain=plain or not _has_screen(), quiet=quiet)


def _given(ctx: typer.Context, options: opt.Options) -> frozenset[str]:
    """Return the names of sampling parameters set on the command line, which a resumed conversation uses."""
    greedy = {"temperature"} if options.greedy else set[str]()
    typed = {name for name in SamplingParams.__dataclass_fields__ if opt.is_typed(ctx, name)}
    return frozenset(typed | greedy)


def _has_screen() -> bool:
    """Return whether stdin, stdout and stderr are a terminal that can move its cursor.

    The terminal UI draws on stderr.
    """
    ends = (sys.stdin, sys.stdout, sys.stderr)
    return all(end is not None and end.isatty() for end in ends) and os.environ.get("TERM", "dumb") != "dumb"


def _begin(setup: ChatSetup, *, plain: bool, quiet: bool) -> None:
    from offspec.chat.archive import SessionArchive
    from offspec.chat.conversation import Conversation

    archive = SessionArchive()
    file = setup.session_to_resume(archive)
    if file is not None:
        # Report an unreadable file now, not after minutes of loading.
        Conversation.read(file)
        if archive.is_in_use(file):
            raise SessionError(
                f"the conversation in {file} is open in another terminal; close it there first"
            )
    if plain:
        from offspec.ui.cli import line_mode

        line_mode.run(setup, open_engine, archive, quiet=quiet)
        return
    from offspec.ui import tui

    code = tui.run(setup, open_engine, archive)
    if code:
        raise typer.Exit(code)
