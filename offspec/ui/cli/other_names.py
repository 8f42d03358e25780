"""Commands typed as another program has them, or without a model: the message says what to type."""

import shlex
from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperGroup

from offspec.core.errors import RequestError

# By the command that was typed: the remedy, in which {words} are the words that followed it.
_ANSWERS: Mapping[str, Mapping[str, str]] = {
    "offspec": {
        "run": "`offspec chat {model}` holds a conversation, `offspec generate {model} PROMPT` answers once",
        "pull": "write `offspec models pull {model}`",
        "download": "write `offspec models pull {model}`",
        "list": "`offspec models` lists what is downloaded, `offspec plan list` models to download",
        "ls": "`offspec models` lists what is downloaded, `offspec plan list` models to download",
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
_MODEL = "Give a folder, a .gguf file, a hub id or demo; offspec models lists those you have."


class Commands(TyperGroup):
    """A group that knows what its commands are called elsewhere."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command. A usage error about a missing MODEL says what can be given."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            if not error.message and error.param is not None and error.param.metavar == "MODEL":
                error.message = _MODEL
            raise

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command. Raises RequestError for the name of another program's command."""
        if args and self.get_command(ctx, args[0]) is None and (told := _answer(ctx.command_path, args)):
            raise RequestError(told)
        return super().resolve_command(ctx, args)


def _answer(group: str, args: list[str]) -> str | None:
    answer = _ANSWERS.get(group, {}).get(args[0])
    if answer is None:
        return None
    words = [word for word in args[1:] if not word.startswith("-")]
    model = shlex.quote(words[0]) if words else "MODEL"
    remedy = answer.format(model=model, words="".join(f"{word} " for word in words[:1]))
    return f"offspec has no command {args[0]}: {remedy}"
