"""Options of commands, made from the settings of `EngineConfig` and `SamplingParams` and from docstrings."""

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

_SAMPLED = ("generate", "chat", "serve", "batch")  # commands that use the model's sampling defaults
_SHORT = {"quiet": ("-q",), "yes": ("-y",)}


@dataclass(frozen=True)
class Options:
    """Values of the options that a command shares with others.

    Args:
        values: Settings that were given or have a default here, by name.
        plan: File of the plan to follow.
        greedy: Whether to ignore the model's sampling defaults.
    """

    values: dict[str, Any]
    plan: Path | None = None
    greedy: bool = False

    def __post_init__(self) -> None:
        if self.greedy and self.values.get("temperature"):
            raise RequestError("--greedy is temperature 0: leave out --greedy or --temperature")
        if self.greedy:
            self.values["temperature"] = 0.0

    @property
    def model(self) -> str:
        return str(self.values["model"])

    def config(self, **usual: Any) -> EngineConfig:
        """The config that they come to. usual: fields where they leave these open. Raises RequestError."""
        return EngineConfig(**usual | self._of(EngineConfig))

    def params(self) -> SamplingParams:
        """The parameters that they come to, whatever the model. Raises RequestError."""
        return SamplingParams(**self._of(SamplingParams))

    def overrides(self, **others: Any) -> SamplingOverrides:
        """The parameters that they set over the model's. others: further fields. Raises RequestError."""
        return SamplingOverrides(self._of(SamplingParams) | others, self.greedy)

    def _of(self, kind: type) -> dict[str, Any]:
        return {name: self.values[name] for name in settings_of(kind) if name in self.values}


def checked_device(value: str) -> str:
    """One device, or several GPUs. Raises typer.BadParameter."""
    if not re.fullmatch(r"auto|cpu|all|cuda(:\d+)?(,cuda:\d+)*", value):
        raise typer.BadParameter(
            f"{value!r} is not auto, cpu or cuda (cuda:1: the second GPU; cuda:0,cuda:1: two; all: every GPU)"
        )
    return value


def _token_ids(value: str) -> tuple[int, ...]:
    """Token ids from "1,2,30"."""
    if not re.fullmatch(r"\d+(,\d+)*", value):
        raise typer.BadParameter(f"{value!r} is no list of token ids; write them like 13,198")
    return tuple(map(int, value.split(",")))


def _biases(value: str) -> tuple[tuple[int, float], ...]:
    """Token ids and what is added to their logits, from "13=-2.5,198=1"."""
    try:
        pairs = [pair.split("=") for pair in value.split(",")]
        return tuple((int(token), float(bias)) for token, bias in pairs)
    except ValueError:
        raise typer.BadParameter(f"{value!r} is no list of biases; write them like 13=-2.5,198=1") from None


def _number_or_auto(value: str, unit: str) -> int | None:
    """A number, or None for "auto"."""
    if value != "auto" and not re.fullmatch(r"\d+", value):
        raise typer.BadParameter(f"{value!r} is neither a number of {unit} nor auto")
    return None if value == "auto" else int(value)


def _one_of_few(setting: Setting, value: int | None) -> int | None:
    """A number that Typer cannot check. Raises RequestError."""
    if setting.fault(value):
        raise RequestError(f"--{setting.option} must be {setting.range}, not {value}")
    return value


def _reading(setting: Setting) -> tuple[Any, dict[str, Any]]:
    """The type that Typer reads the option as, and what it needs in addition."""
    kind = setting.type
    if setting.unit == "bytes":
        read_size = partial(parse_bytes, least=int(setting.least is None))
        return int | None, {"parser": read_size, "metavar": "SIZE"}
    if setting.auto:
        return Any, {"parser": partial(_number_or_auto, unit=setting.unit)}
    if setting.choices and isinstance(setting.choices[0], int):
        return int | None, {"callback": lambda value: _one_of_few(setting, value)}
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
    "draft": {"autocompletion": completion.drafts},
    "device": {"callback": checked_device},
}


def _default(setting: Setting) -> Any:
    """The value without the option; None: that of the setting, or the model's."""
    if setting.auto:
        return "auto"
    if setting.unit == "bytes" or setting.name in FROM_MODEL or setting.default == ():
        return None
    return setting.default


def _help(setting: Setting) -> str:
    """The help as Typer has it: backticks are bold, settings are options, and None has another name."""
    text = setting.help
    if setting.default is None:
        text = text.replace("None:", "Without it:")
        text = text.replace("None", "`auto`") if setting.auto else text
    if setting.type in (tuple[str, ...], tuple[Path, ...]):
        text += " May be given several times."
    return _bold(text)


def _bold(text: str) -> str:
    """The text with bold type in place of backticks, and options in place of settings."""

    def bold(found: re.Match[str]) -> str:
        name, _, value = found[1].replace('"', "").partition("=")
        if name in OPTIONS and name != "model":
            name = f"--{OPTIONS[name].option}"
        return f"[bold]{name} {value}".rstrip() + "[/]"

    return re.sub("`([^`]*)`", bold, text)


class _Documented(NamedTuple):
    """An option in a docstring."""

    help: str
    metavar: str | None
    panel: str | None


def _read_docstring(text: str) -> tuple[str, Mapping[str, _Documented]]:
    """The help of a command, and its options by parameter.

    A section of the docstring is a panel of the help, in which `name (METAVAR): Its help.` is an option.
    """
    about, *sections = re.split(r"^(\S.*):\n(?=    )", inspect.cleandoc(text), flags=re.MULTILINE)
    found = {}
    for title, entries in zip(sections[::2], sections[1::2], strict=True):
        panel = None if title in ("Args", "Options") else title
        for name, metavar, help in re.findall(
            r"^    (\w+)(?: \((.+?)\))?: (.*(?:\n {8}.*)*)", entries, re.MULTILINE
        ):
            found[name] = _Documented(_bold(" ".join(help.split())), metavar or None, panel)
    return about.strip(), found


def _own(parameter: inspect.Parameter, documented: _Documented | None) -> inspect.Parameter:
    """A parameter that is no setting: an option, unless it is declared as an argument."""
    annotated = get_origin(parameter.annotation) is Annotated
    kind, info = get_args(parameter.annotation) if annotated else (parameter.annotation, typer.Option())
    info = copy(info)
    if not isinstance(info, ArgumentInfo):
        if info.default is ...:  # else it is the first of the names, as Typer keeps them
            name = parameter.name.removeprefix("as_").replace("_", "-")
            info.param_decls = (f"--{name}", *_SHORT.get(name, ()))
        if kind is bool:
            info.metavar = ""  # or the help would show a type
    if documented is not None:
        info.help, info.rich_help_panel = documented.help, documented.panel
        info.metavar = documented.metavar or info.metavar
    return _keyword(parameter.name, Annotated[kind, info], parameter.default)


def _parameter(setting: Setting, command: str) -> inspect.Parameter:
    kind, more = _reading(setting)
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
    """Parameters in the place of `options`, in the order of the help."""
    for name, setting in OPTIONS.items():
        if command in setting.commands:
            yield _parameter(setting, command)
        if name == "tree" and command in RUNS:
            yield _own(_keyword("plan", Path | None, None), _PLAN)
        if name == "seed" and command in _SAMPLED:
            yield _own(_keyword("greedy", bool, False), _GREEDY)


# Options that are no settings of their own.
_PLAN = _Documented(
    "Follow a plan that [bold]offspec plan --save[/] wrote, with your changes in it.", "FILE", DRAFT
)
_GREEDY = _Documented(
    "Temperature 0, and no sampling defaults of the model. Without it, sampling options that you omit have "
    "the values of the model's [bold]generation_config.json[/], or of [bold]general.sampling[/] in a GGUF "
    "file.",
    None,
    SAMPLING,
)


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command as Typer is to see it.

    Options of settings come in the place of `options`, and of each parameter that is named as a setting and
    has a plain type; such a parameter keeps its default. The others are options of the command's own. Their
    help, and another help for a setting, is in the docstring: each section of it is a panel.
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

    @wraps(command)
    def run(**given: Any) -> None:
        if "options" in own:
            shared = {name: given.pop(name) for name in seen if name not in own}
            plan, greedy = shared.pop("plan", None), shared.pop("greedy", False)
            values = {name: value for name, value in shared.items() if value is not None}
            given["options"] = Options(values, plan, greedy)
        command(**given)

    run.__doc__ = about
    vars(run)["__signature__"] = inspect.Signature(list(seen.values()))
    return run
