"""Hints for commands of other programs, and for commands without a model."""

import shlex
from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperGroup

from offspec.core.errors import RequestError
from offspec.ui.cli.short_help import without_help_all, without_types
from offspec.ui.cli.value_errors import reworded

# Remedy by the command that was typed; {words} stands for the words after it.
_ANSWERS: Mapping[str, Mapping[str, str]] = {
    "offspec": {
        "run": "`offspec chat {model}` holds a conversation, `offspec generate {model} PROMPT` answers once",
        "pull": "write `offspec models pull {model}`",
        "download": "write `offspec models pull {model}`",
        "list": "`offspec models` lists downloaded models, `offspec plan list` models to download",
        "ls": "`offspec models` lists downloaded models, `offspec plan list` models to download",
        "rm": "write `offspec models rm {model}`",
        "show": "write `offspec plan {model}`",
        "server": "write `offspec serve {model}`",
        "help": "write `offspec {words}--help`",
        "version": "write `offspec --version`",
    },
    "offspec models": {
        "list": "write `offspec models`",
        "ls": "write `offspec models`",
        "download": "write `offspec models pull {model}`",
        "remove": "write `offspec models rm {model}`",
    },
}
_MODEL = "Give a folder, a .gguf file, a Hugging Face id or demo; offspec models lists downloaded models."


class AliasedGroup(TyperGroup):
    """Command group with hints for names of commands in other programs."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Options of the group itself."""
        return without_types(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse the words after the group; those after the name of a command are the command's."""
        return super().parse_args(ctx, [*without_help_all(args[:1]), *args[1:]])

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Usage errors about a value say in plain words what it must be."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            if not error.message and error.param is not None and error.param.metavar == "MODEL":
                error.message = _MODEL
            error.message = reworded(error)
            raise

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command. Raises RequestError for the name of another program's command."""
        if args and self.get_command(ctx, args[0]) is None and (hint := _answer(ctx.command_path, args)):
            raise RequestError(hint)
        return super().resolve_command(ctx, args)


def _answer(group: str, args: list[str]) -> str | None:
    answer = _ANSWERS.get(group, {}).get(args[0])
    if answer is None:
        return None
    words = [word for word in args[1:] if not word.startswith("-")]
    model = shlex.quote(words[0]) if words else "MODEL"
    remedy = answer.format(model=model, words="".join(f"{word} " for word in words[:1]))
    return f"offspec has no command {args[0]}: {remedy}"
