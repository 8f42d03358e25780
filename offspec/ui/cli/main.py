"""The program `offspec`: its commands, error output and exit codes.

| event                            | stderr              | exit code            |
|----------------------------------|---------------------|----------------------|
| an `OffspecError`                | one line, `error: ` | its `exit_code`      |
| a usage error                    | typer's own panel   | 2                    |
| Ctrl-C                           | one line, `stopped` | 130, as in a shell   |
| stdout closed by its reader      | nothing             | 141, as in a shell   |
| anything else: a bug in offspec  | a traceback         | 1                    |
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from offspec import __version__
from offspec.core.errors import OffspecError
from offspec.core.openmp import limit_spinning
from offspec.core.setting import PLANS
from offspec.ui import interrupt
from offspec.ui.cli import (
    batch,
    bench,
    chat,
    config,
    demo,
    distill,
    doctor,
    generate,
    hardware,
    models,
    pack,
    plan,
    serve,
)
from offspec.ui.cli.command_aliases import AliasedGroup
from offspec.ui.cli.defaults import default_map
from offspec.ui.cli.output import StdoutClosed, abandon_stdout
from offspec.ui.cli.short_help import ShortHelpCommand
from offspec.ui.messages import option_first, user_message
from offspec.ui.printable import sanitize_library_output

_NO_READER = 128 + 13  # SIGPIPE


@contextmanager
def _failing_plainly() -> Iterator[None]:
    """Turn errors that a user can cause into one line and an exit code. Let bugs pass through."""
    try:
        yield
    except OffspecError as error:
        typer.echo("error: " + " ".join(option_first(user_message(error)).splitlines()), err=True)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        raise typer.Exit(interrupt.CODE) from None
    except StdoutClosed:
        abandon_stdout()
        raise typer.Exit(_NO_READER) from None


class _Program(AliasedGroup):
    def invoke(self, ctx: Any) -> Any:
        ctx.obj = list(ctx.args)  # the words after the command; the callback below cannot see them
        with interrupt.command(), _failing_plainly():
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Program,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"offspec {__version__}")
        raise typer.Exit


@app.callback()
def offspec(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", callback=_show_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Run language models larger than your memory.

    Weights are streamed from disk or RAM. A draft proposes a tree of
    tokens, and each forward pass of the model verifies the whole tree.
    """
    if ctx.invoked_subcommand in PLANS:
        ctx.default_map = dict(default_map(ctx.command, ctx.obj))


for module in (generate, chat, serve, batch, plan, bench, pack, distill, hardware, doctor, demo):
    function = getattr(module, module.__name__.rpartition(".")[2])
    app.command(cls=ShortHelpCommand, epilog=module.EPILOG)(function)
app.add_typer(models.app, name="models")
app.add_typer(config.app, name="config")


def main() -> None:
    """Entry point of the script `offspec`. Exits by SystemExit."""
    interrupt.listen()
    sanitize_library_output()
    limit_spinning()  # before a command imports torch
    app(prog_name="offspec")
