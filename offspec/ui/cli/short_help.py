"""Two forms of the help: `--help` shows the main options of a command, `--help-all` shows all of them."""

from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperCommand

_SHARED = ("memory", "vram", "device", "context", "quantize", "draft", "temperature", "seed")
# Options in the short help, by command. A command that is not listed has few options and shows them all.
MAIN_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "generate": (*_SHARED, "max-tokens", "system", "json-schema", "json", "check"),
    "chat": (*_SHARED, "max-tokens", "system", "resume", "plain"),
    "serve": (*_SHARED, "sequences", "host", "port", "api-key", "alias"),
    "batch": (*_SHARED, "sequences", "validate", "ray"),
    "plan": (
        "memory",
        "vram",
        "device",
        "context",
        "quantize",
        "draft",
        "hardware",
        "validate",
        "replan",
        "json",
    ),
    "bench": ("memory", "vram", "device", "quantize", "draft", "seconds", "json"),
}
_IS_SHORT = "offspec.short_help"


def show_all(ctx: typer.Context, wanted: bool) -> None:
    """Callback of `--help-all`: print the whole help and exit."""
    if wanted and not ctx.resilient_parsing:
        ctx.meta[_IS_SHORT] = False
        typer.echo(ctx.get_help(), color=ctx.color)
        raise typer.Exit


def without_help_all(words: list[str]) -> list[str]:
    """Replace the option `--help-all` by `--help`, for a command whose help has all options already."""
    end = words.index("--") if "--" in words else len(words)
    return ["--help" if word == "--help-all" else word for word in words[:end]] + words[end:]


def without_types(params: list[Any]) -> list[Any]:
    """The parameters, with Typer's own flags shown without `<bool>`."""
    for param in params:
        if param.name in ("help", "install_completion", "show_completion"):
            param.metavar = ""
    return params


class ShortHelpCommand(TyperCommand):
    """A command with `--help` for its main options and `--help-all` for all of them."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Parameters of the command; while the short help is printed, the arguments and main options."""
        params = super().get_params(ctx)
        hidden = self._hidden(params)
        for param in without_types(params):
            if param.name == "help_all":
                param.help = f"Show all options ({len(hidden)} more) and exit."
                param.hidden = not hidden
        return [each for each in params if each not in hidden] if ctx.meta.get(_IS_SHORT) else params

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse the words after the command, which may be `--help-all` even if it is not declared."""
        declared = any(param.name == "help_all" for param in self.params)
        return super().parse_args(ctx, args if declared else without_help_all(args))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the short help, or the whole after `--help-all`."""
        ctx.meta.setdefault(_IS_SHORT, True)
        super().format_help(ctx, formatter)

    def _hidden(self, params: list[Any]) -> list[Any]:
        main = MAIN_OPTIONS.get(self.name or "")
        if main is None:
            return []
        shown = {f"--{name}" for name in (*main, "help", "help-all")}
        return [each for each in params if each.param_type_name == "option" and shown.isdisjoint(each.opts)]
