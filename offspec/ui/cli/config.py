"""`offspec config`: the user's defaults in one TOML file."""

from functools import partial
from typing import Annotated

import typer

from offspec.core.config import OPTIONS
from offspec.core.errors import RequestError
from offspec.core.user_config import UserConfig, Value
from offspec.ui.cli import completion, defaults
from offspec.ui.cli.command_aliases import AliasedGroup
from offspec.ui.cli.output import StdoutWriter
from offspec.ui.cli.short_help import ShortHelpCommand

EPILOG = """[bold]Examples[/]

Set the default model and memory limit, then chat:

  offspec config set model Qwen/Qwen3-8B

  offspec config set memory 12GB

  offspec chat
"""

app = typer.Typer(cls=AliasedGroup, no_args_is_help=True, rich_markup_mode="rich", epilog=EPILOG)

_key = partial(typer.Argument, metavar="KEY", help=f"One of {', '.join(defaults.KEYS)}.", show_default=False)
Key = Annotated[str, _key(autocompletion=completion.config_keys)]
KeyThatIsSet = Annotated[str, _key(autocompletion=completion.set_config_keys)]
Text = Annotated[
    str,
    typer.Argument(
        metavar="VALUE",
        help="Value in the syntax of the option.",
        show_default=False,
        autocompletion=completion.config_values,
    ),
]


@app.callback()
def config() -> None:
    """Set defaults for options of generate, chat, serve, batch, bench and plan.

    Options on the command line take precedence. The defaults are stored in
    config.toml in ~/.config/offspec, or in the folder $OFFSPEC_CONFIG.
    """


@app.command("list", cls=ShortHelpCommand)
def list_all() -> None:
    """Print all defaults that are set."""
    StdoutWriter().write("".join(f"{key} = {value}\n" for key, value in UserConfig().values.items()))


@app.command(cls=ShortHelpCommand)
def get(key: KeyThatIsSet) -> None:
    """Print a default."""
    StdoutWriter().write(f"{_found(UserConfig(), key)}\n")


@app.command("set", cls=ShortHelpCommand)
def set_one(
    ctx: typer.Context,
    key: Key,
    value: Text,
) -> None:
    """Set a default. Values that the option does not accept are rejected."""
    defaults.check(ctx.find_root().command, key, value)
    config = UserConfig()
    setting = OPTIONS.get(key.replace("-", "_"))
    config.set(key, _number(value) if setting is not None and setting.is_numeric else value)
    StdoutWriter().write(f"{key} = {value} in {config.file}\n")


@app.command(cls=ShortHelpCommand)
def unset(key: KeyThatIsSet) -> None:
    """Remove a default, even an invalid one."""
    config = UserConfig()
    _found(config, key)
    config.unset(key)


@app.command(cls=ShortHelpCommand)
def path() -> None:
    """Print the path of the file, whether or not it exists."""
    StdoutWriter().write(f"{UserConfig().file}\n")


def _found(config: UserConfig, key: str) -> Value:
    if key not in config.values:
        raise RequestError(f"{key} is not set; keys that are set: {', '.join(config.values) or 'none'}")
    return config.values[key]


def _number(text: str) -> Value:
    return float(text) if "." in text or "e" in text.lower() else int(text)
