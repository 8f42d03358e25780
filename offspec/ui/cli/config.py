"""`offspec config`: the user's defaults, in one TOML file."""

from functools import partial
from typing import Annotated

import typer

from offspec.core.config import OPTIONS
from offspec.core.errors import RequestError
from offspec.core.user_config import UserConfig, Value
from offspec.ui.cli import completion, defaults
from offspec.ui.cli.output import Output

EPILOG = """[bold]Examples[/]

Talk to this model, in this much memory, wherever nothing else is said:

  offspec config set model Qwen/Qwen3-8B

  offspec config set memory 12GB

  offspec chat
"""

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", epilog=EPILOG)

_key = partial(typer.Argument, metavar="KEY", help=f"One of {', '.join(defaults.KEYS)}.", show_default=False)
Key = Annotated[str, _key(autocompletion=completion.config_keys)]
KeyThatIsSet = Annotated[str, _key(autocompletion=completion.set_config_keys)]
Text = Annotated[
    str,
    typer.Argument(
        metavar="VALUE",
        help="As the option takes it.",
        show_default=False,
        autocompletion=completion.config_values,
    ),
]


@app.callback()
def config() -> None:
    """Defaults for options of generate, chat, serve, batch, bench and plan. The command line wins.

    They are kept in config.toml in ~/.config/offspec, or $OFFSPEC_CONFIG.
    """


@app.command("list")
def list_all() -> None:
    """Print all defaults that are set."""
    Output().write("".join(f"{key} = {value}\n" for key, value in UserConfig().values.items()))


@app.command()
def get(key: KeyThatIsSet) -> None:
    """Print a default."""
    Output().write(f"{_found(UserConfig(), key)}\n")


@app.command("set")
def set_one(
    ctx: typer.Context,
    key: Key,
    value: Text,
) -> None:
    """Set a default. A value that its option would not take is refused."""
    defaults.check(ctx.find_root().command, key, value)
    config = UserConfig()
    setting = OPTIONS.get(key.replace("-", "_"))
    config.set(key, _number(value) if setting is not None and setting.numeric else value)
    Output().write(f"{key} = {value} in {config.file}\n")


@app.command()
def unset(key: KeyThatIsSet) -> None:
    """Remove a default, also one that is wrong."""
    config = UserConfig()
    _found(config, key)
    config.unset(key)


@app.command()
def path() -> None:
    """Print where the file is, or would be."""
    Output().write(f"{UserConfig().file}\n")


def _found(config: UserConfig, key: str) -> Value:
    if key not in config.values:
        raise RequestError(f"{key} is not set; set are: {', '.join(config.values) or 'none'}")
    return config.values[key]


def _number(text: str) -> Value:
    return float(text) if "." in text or "e" in text.lower() else int(text)
