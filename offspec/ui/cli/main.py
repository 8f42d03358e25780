"""The program `offspec`: its commands, and how each way of failing looks to the user.

| what happened                    | stderr              | exit code            |
|----------------------------------|---------------------|----------------------|
| an `OffspecError`                | one line, `error: ` | its `exit_code`      |
| a usage error                    | typer's own panel   | 2                    |
| Ctrl-C                           | one line, `stopped` | 130, as a shell has  |
| the reader of stdout went away   | nothing             | 141, as a shell has  |
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
from offspec.ui.cli.defaults import default_map
from offspec.ui.cli.other_names import Commands
from offspec.ui.cli.output import StdoutClosed, abandon_stdout
from offspec.ui.printable import guard_libraries
from offspec.ui.told import option_first, told

_NO_READER = 128 + 13  # SIGPIPE


@contextmanager
def _failing_plainly() -> Iterator[None]:
    """Turn what a user can cause into one line and an exit code. Bugs pass through."""
    try:
        yield
    except OffspecError as error:
        typer.echo("error: " + " ".join(option_first(told(error)).splitlines()), err=True)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        raise typer.Exit(interrupt.CODE) from None
    except StdoutClosed:
        abandon_stdout()
        raise typer.Exit(_NO_READER) from None


class _Program(Commands):
    def invoke(self, ctx: Any) -> Any:
        ctx.obj = list(ctx.args)  # behind the command; the callback below finds none there
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

    The weights stay on disk and stream through memory. A draft proposes a
    tree of tokens, and each pass of the model verifies the whole tree.
    """
    if ctx.invoked_subcommand in PLANS:
        ctx.default_map = dict(default_map(ctx.command, ctx.obj))


app.command(epilog=generate.EPILOG)(generate.generate)
app.command(epilog=chat.EPILOG)(chat.chat)
app.command(epilog=serve.EPILOG)(serve.serve)
app.command(epilog=batch.EPILOG)(batch.batch)
app.command(epilog=plan.EPILOG)(plan.plan)
app.command(epilog=bench.EPILOG)(bench.bench)
app.command(epilog=pack.EPILOG)(pack.pack)
app.command(epilog=distill.EPILOG)(distill.distill)
app.command(epilog=hardware.EPILOG)(hardware.hardware)
app.command(epilog=doctor.EPILOG)(doctor.doctor)
app.command(epilog=demo.EPILOG)(demo.demo)
app.add_typer(models.app, name="models")
app.add_typer(config.app, name="config")


def main() -> None:
    """The entry point of the script `offspec`. Leaves by SystemExit."""
    interrupt.listen()
    guard_libraries()
    limit_spinning()  # before a command imports torch
    app(prog_name="offspec")
