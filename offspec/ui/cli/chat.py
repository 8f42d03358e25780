"""`offspec chat`: from options to a conversation, in the terminal UI or in line mode."""

import os
import sys
from typing import Annotated, Literal

import typer

from offspec.core.config import SamplingParams
from offspec.core.errors import RequestError, SessionError
from offspec.ui.chat.setup import Setup, command_words, open_engine
from offspec.ui.cli import checks, completion
from offspec.ui.cli import options as opt

EPILOG = """[bold]Examples[/]

Talk to the small model that comes with the project:

  offspec chat demo

A large model with a small one as its draft; then continue the conversation another day:

  offspec chat ./Qwen3-32B --draft ./Qwen3-0.6B --temperature 0.7

  offspec chat ./Qwen3-32B --draft ./Qwen3-0.6B --resume

A question from a pipe, in a named conversation (name it with [bold]/save shopping[/]):

  echo "And for six people?" | offspec chat demo --session shopping > answer.txt

In the chat, [bold]/help[/] lists the commands, and Esc stops an answer (in the line mode Ctrl-C does).
Conversations are saved as they go, each in a file under ~/.local/share/offspec, or $OFFSPEC_DATA.
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
    """Chat with a model. Its caches keep the conversation, so each question computes only its own tokens.

    Prompt and output:
        system (TEXT): A system message before the prompt.
        resume: Continue the latest conversation with this model.
        session (NAME): Continue this conversation: its name, the beginning of its id, or its file.
        plain: Line mode: questions from standard input, answers on standard output. The default where one of
            the two is a pipe or a file.
        notify: Ring the terminal's bell when an answer took over ten seconds, and show a desktop notice
            (OSC 9) if another window has the focus. Not in line mode.
        quiet: No progress, notices or statistics on stderr.
    """
    if session is not None and resume:
        raise RequestError("--session NAME continues that conversation already; leave out --resume")
    if session is not None and not session.strip():
        raise RequestError("--session needs a name; --resume continues the latest conversation")
    setup = Setup(
        config=options.config(converses=True),
        sampling=options.overrides(max_tokens=max_tokens, stop=stop or ()),
        system=system,
        plan=options.plan,
        resume="" if resume else session,
        given=_given(ctx, options),
        command=command_words(sys.argv),
        notify=notify == "on",
    )
    checks.check_files(setup.config, setup.plan)
    _begin(setup, plain=plain or not _has_screen(), quiet=quiet)


def _given(ctx: typer.Context, options: opt.Options) -> frozenset[str]:
    """The sampling parameters that the user set, as a resumed conversation should take them over."""
    greedy = {"temperature"} if options.greedy else set[str]()
    sources = {name: ctx.get_parameter_source(name) for name in SamplingParams.__dataclass_fields__}
    typed = {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}
    return frozenset(typed | greedy)


def _has_screen() -> bool:
    """Whether there is a terminal that can move its cursor at all ends: the terminal UI draws on stderr."""
    ends = (sys.stdin, sys.stdout, sys.stderr)
    return all(end is not None and end.isatty() for end in ends) and os.environ.get("TERM", "dumb") != "dumb"


def _begin(setup: Setup, *, plain: bool, quiet: bool) -> None:
    from offspec.chat.archive import Archive
    from offspec.chat.conversation import Conversation

    archive = Archive()
    file = setup.resumed(archive)
    if file is not None:
        # Report what is wrong with it now, not after minutes of loading.
        Conversation.read(file)
        if archive.is_open(file):
            raise SessionError(
                f"the conversation in {file} is open in another terminal; leave it there first"
            )
    if plain:
        from offspec.ui.cli import plain as line_mode

        line_mode.run(setup, open_engine, archive, quiet=quiet)
        return
    from offspec.ui import tui

    code = tui.run(setup, open_engine, archive)
    if code:
        raise typer.Exit(code)
