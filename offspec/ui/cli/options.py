"""Command-line options, built from the settings of `EngineConfig` and `SamplingParams` and docstrings."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import typer
from typer.models import ArgumentInfo

from offspec.core.config import OPTIONS, EngineConfig, SamplingParams
from offspec.core.errors import RequestError
from offspec.core.sampling_defaults import FROM_MODEL, SamplingOverrides
from offspec.core.setting import DRAFT, RUNS, SAMPLING, Setting, settings_of
from offspec.core.values import parse_bytes
from offspec.ui.cli import completion
from offspec.ui.cli.short_help import show_all

_SAMPLED = ("generate", "chat", "serve", "batch")  # commands that use the model's sampling defaults
_SHORT = {"quiet": ("-q",), "yes": ("-y",)}


@dataclass(frozen=True)
class Options:
    """Values of the options that several commands share.

    Args:
        values: Settings by name that were given or have a default.
        plan: Plan file to use.
        greedy: Whether to ignore the model's sampling defaults.
    """

    values: dict[str, Any]
    plan: Path | None = None
    greedy: bool = False

    def __post_init__(self) -> None:
        if self.greedy and self.values.get("temperature"):
            raise RequestError("--greedy sets temperature 0: omit --greedy or --temperature")
        if self.greedy:
            self.values["temperature"] = 0.0

    @property
    def model(self) -> str:
        return str(self.values["model"])

    def config(self, **usual: Any) -> EngineConfig:
        """Return the engine configuration. Raises RequestError.

        usual: values of fields that no option sets.
        """
        return EngineConfig(**usual | self._of(EngineConfig))

    def params(self) -> SamplingParams:
        """Return the sampling parameters, without the model's defaults. Raises RequestError."""
        return SamplingParams(**self._of(SamplingParams))

    def overrides(self, **others: Any) -> SamplingOverrides:
        """Return the sampling parameters that override the model's defaults. Raises RequestError.

        others: further fields.
        """
        return SamplingOverrides(self._of(SamplingParams) | others, self.greedy)

    def _of(self, kind: type) -> dict[str, Any]:
        return {name: self.values[name] for name in settings_of(kind) if name in self.values}


def is_typed(ctx: typer.Context, name: str) -> bool:
    """Return whether an option was given on the command line, not by the user's defaults."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def checked_device(value: str) -> str:
    """Return `value` if it is the syntax of one device or several GPUs. Raises typer.BadParameter."""
    if not re.fullmatch(r"auto|cpu|all|cuda(:\d+)?(,cuda:\d+)*", value):
        raise typer.BadParameter(
            f"{value!r} is not auto, cpu or cuda (cuda:1: the second GPU; cuda:0,cuda:1: two; all: every GPU)"
        )
    return value


def _token_ids(value: str) -> tuple[int, ...]:
    """Parse token ids such as "1,2,30"."""
    if not re.fullmatch(r"\d+(,\d+)*", value):
        raise typer.BadParameter(f"{value!r} is not a list of token ids; write them like 13,198")
    return tuple(map(int, value.split(",")))


def _biases(value: str) -> tuple[tuple[int, float], ...]:
    """Parse token ids and logit biases such as "13=-2.5,198=1"."""
    try:
        pairs = [pair.split("=") for pair in value.split(",")]
        return tuple((int(token), float(bias)) for token, bias in pairs)
    except ValueError:
        raise typer.BadParameter(
            f"{value!r} is not a list of biases; write them like 13=-2.5,198=1"
        ) from None


def _number_or_auto(value: str, unit: str) -> int | None:
    """Parse a number, or "auto" as None."""
    if value != "auto" and not re.fullmatch(r"\d+", value):
        raise typer.BadParameter(f"{value!r} is neither a number of {unit} nor auto")
    return None if value == "auto" else int(value)


def _checked_number(setting: Setting, value: int | None) -> int | None:
    """Check a number whose range Typer cannot check, and return it. Raises RequestError."""
    if setting.range_error(value):
        raise RequestError(f"--{setting.option} must be {setting.range}, not {value}")
    return value


def _typer_type(setting: Setting) -> tuple[Any, dict[str, Any]]:
    """Return the option's type for Typer and further keyword arguments of `typer.Option`."""
    kind = setting.type
    if setting.unit == "bytes":
        read_size = partial(parse_bytes, least=int(setting.least is None))
        return int | None, {"parser": read_size, "metavar": "SIZE"}
    if setting.auto:
        return Any, {"parser": partial(_number_or_auto, unit=setting.unit)}
    if setting.choices and isinstance(setting.choices[0], int):
        return int | None, {"callback": lambda value: _checked_number(setting, value)}
    if kind in _TYPES:
        return _TYPES[kind]
    return kind if _default(setting) is not None else kind | None, _PARTICULAR.get(setting.name, {})


_TYPES: Mapping[Any, tuple[Any, dict[str, Any]]] = {
    bool: (bool, {"metavar": ""}),
    tuple[str, ...]: (list[str] | None, {}),
    tuple[Path, ...]: (list[Path] | None, {"exists": True}),
    tuple[int, ...]: (Any, {"parser": _token_ids}),
    tuple[tuple[int, float], ...]: (Any, {"parser": _biases}),
}
_PARTICULAR: Mapping[str, dict[str, Any]] = {
    "draft": {"autocompletion": completion.draft_sources},
    "device": {"callback": checked_device},
}


def _default(setting: Setting) -> Any:
    """Return the option's default; None stands for the setting's default or the model's."""
    if setting.auto:
        return "auto"
    if setting.unit == "bytes" or setting.name in FROM_MODEL or setting.default == ():
        return None
    return setting.default


def _help(setting: Setting) -> str:
    """Return the help in Typer's markup, with settings as options and None as "auto" or "Default"."""
    text = setting.help
    if setting.default is None:
        text = text.replace("None:", "Default:")
        text = text.replace("None", "`auto`") if setting.auto else text
    if setting.type in (tuple[str, ...], tuple[Path, ...]):
        text += " Repeatable."
    return _bold(text)


def _bold(text: str) -> str:
    """Replace backticks by bold markup and names of settings by options."""

    def bold(found: re.Match[str]) -> str:
        name, _, value = found[1].replace('"', "").partition("=")
        if name in OPTIONS and name != "model":
            name = f"--{OPTIONS[name].option}"
        return f"[bold]{name} {value}".rstrip() + "[/]"

    return re.sub("`([^`]*)`", bold, text)


class _OptionDoc(NamedTuple):
    """Option documented in a docstring."""

    help: str
    metavar: str | None
    panel: str | None


def _read_docstring(text: str) -> tuple[str, Mapping[str, _OptionDoc]]:
    """Split a docstring into the help of the command and its options by parameter.

    A section of the docstring is a panel of the help, and `name (METAVAR): Help.` in it is an option.
    """
    about, *sections = re.split(r"^(\S.*):\n(?=    )", inspect.cleandoc(text), flags=re.MULTILINE)
    found = {}
    for title, entries in zip(sections[::2], sections[1::2], strict=True):
        panel = None if title in ("Args", "Options") else title
        for name, metavar, help in re.findall(
            r"^    (\w+)(?: \((.+?)\))?: (.*(?:\n {8}.*)*)", entries, re.MULTILINE
        ):
            found[name] = _OptionDoc(_bold(" ".join(help.split())), metavar or None, panel)
    return about.strip(), found


def _own(parameter: inspect.Parameter, documented: _OptionDoc | None) -> inspect.Parameter:
    """Return a parameter that is not a setting, as an option unless it is declared as an argument."""
    annotated = get_origin(parameter.annotation) is Annotated
    kind, info = get_args(parameter.annotation) if annotated else (parameter.annotation, typer.Option())
    info = copy(info)
    if not isinstance(info, ArgumentInfo):
        if info.default is ...:  # otherwise Typer keeps the first of the given names there
            name = parameter.name.removeprefix("as_").replace("_", "-")
            info.param_decls = (f"--{name}", *_SHORT.get(name, ()))
        if kind is bool:
            info.metavar = ""  # otherwise the help shows a type
    if documented is not None:
        info.help, info.rich_help_panel = documented.help, documented.panel
        info.metavar = documented.metavar or info.metavar
    return _keyword(parameter.name, Annotated[kind, info], parameter.default)


def _parameter(setting: Setting, command: str) -> inspect.Parameter:
    kind, more = _typer_type(setting)
    more = {"metavar": setting.metavar, "help": _help(setting)} | more
    if setting.name == "model":
        argument = typer.Argument(show_default=False, autocompletion=completion.models, **more)
        return _keyword("model", Annotated[str, argument], inspect.Parameter.empty)
    if setting.name in FROM_MODEL:
        more["show_default"] = "the model's, or " * (command in _SAMPLED) + f"{setting.default:g}"
    option = typer.Option(f"--{setting.option}", rich_help_panel=setting.group, **more)
    return _keyword(setting.name, Annotated[kind, option], _default(setting))


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _shared(command: str) -> Iterator[inspect.Parameter]:
    """Yield the parameters that replace `options`, in the order of the help."""
    for name, setting in OPTIONS.items():
        if command in setting.commands:
            yield _parameter(setting, command)
        if name == "tree" and command in RUNS:
            yield _own(_keyword("plan", Path | None, None), _PLAN)
        if name == "seed" and command in _SAMPLED:
            yield _own(_keyword("greedy", bool, False), _GREEDY)


# Shared options that are not settings.
_PLAN = _OptionDoc(
    "Plan file to use: written by [bold]offspec plan --save[/], and possibly edited.", "FILE", DRAFT
)
_GREEDY = _OptionDoc(
    "Use temperature 0 and ignore the model's sampling defaults, which are in "
    "[bold]generation_config.json[/], or in [bold]general.sampling[/] of a GGUF file.",
    None,
    SAMPLING,
)


_HELP_ALL = typer.Option(
    "--help-all", is_eager=True, metavar="", callback=show_all, help="Show all options and exit."
)


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the signature that Typer needs.

    Options of settings replace `options` and each parameter that has the name of a setting and a plain type;
    such a parameter keeps its default. All other parameters are options of this command. The docstring holds
    their help, and may override the help of a setting; each section of it is a panel.
    """
    own = inspect.signature(command).parameters
    about, documented = _read_docstring(command.__doc__ or "")
    seen = dict[str, inspect.Parameter]()
    for name, parameter in own.items():
        if name == "options":
            seen |= {each.name: each for each in _shared(command.__name__) if each.name not in own}
        elif parameter.annotation is typer.Context:
            seen[name] = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        elif name in OPTIONS and get_origin(parameter.annotation) is not Annotated:
            setting = OPTIONS[name]
            if name in documented:
                setting = replace(setting, help=documented[name].help, group=documented[name].panel or "")
            seen[name] = _parameter(setting, command.__name__).replace(default=parameter.default)
        else:
            seen[name] = _own(parameter, documented.get(name))
    seen["help_all"] = _keyword("help_all", Annotated[bool, _HELP_ALL], False)

    @wraps(command)
    def run(**given: Any) -> None:
        del given["help_all"]  # its callback has exited by now
        if "options" in own:
            shared = {name: given.pop(name) for name in seen if name not in own and name in given}
            plan, greedy = shared.pop("plan", None), shared.pop("greedy", False)
            values = {name: value for name, value in shared.items() if value is not None}
            given["options"] = Options(values, plan, greedy)
        command(**given)

    run.__doc__ = about
    vars(run)["__signature__"] = inspect.Signature(list(seen.values()))
    return run
