"""Declaration of settings: checks, command-line option, documentation and default in one place.

A setting is a field of `EngineConfig` or `SamplingParams`, `Annotated[type, Setting(...)]`. Its help is its
paragraph in the docstring of the class, under `Args:`, with backticks around settings, values and commands.
"""

import inspect
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from types import NoneType
from typing import Any, Literal, TypeVar, get_args

from offspec.core.errors import RequestError
from offspec.core.values import is_unicode, read_fields, short_repr

RUNS = ("generate", "chat", "serve", "batch", "bench")  # commands that generate text
PLANS = (*RUNS, "plan")
# Panels of options, in the order of the help.
GROUPS = MACHINE, DRAFT, SAMPLING, RULES, OUTPUT = (
    "Model and hardware",
    "Speculative decoding",
    "Sampling",
    "Output constraints",
    "Prompt and output",
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Setting:
    """Metadata of a setting.

    Args:
        metavar: Value placeholder of the option in the help.
        group: Panel of the option in the help, one of `GROUPS`. Default: no option.
        commands: Commands that have the option; others may name it among their parameters.
        option: Name of the option. Default: the setting's name with hyphens.
        unit: Unit of a number; "bytes" may also be written as 1.5GB.
        auto: Whether the option accepts "auto", which leaves the choice to a plan.
        least, above, most: Range of a number: inclusive minimum, exclusive minimum, inclusive maximum.
        expected: Range in words. Default: derived from the type and the range.
        reason: Reason for the range, appended to the error.
        saved: Whether `offspec config` can store a default.
        plan: Effect on plans. "key": each value has its own plan; "record": the plan also records the value,
            which overrides the default and conflicts with any other value; "none": no effect.
        chat: Whether the chat's `/set` can change it.
        name, kind, default: Name, type and default of the field.
        help: Help text.
    """

    metavar: str | None = None
    group: str = ""
    commands: tuple[str, ...] = ()
    option: str = ""
    unit: str = ""
    auto: bool = False
    least: float | None = None
    above: float | None = None
    most: float | None = None
    expected: str = ""
    reason: str = ""
    saved: bool = False
    plan: Literal["key", "record", "none"] = "key"
    chat: bool = False
    name: str = ""
    kind: Any = None
    default: Any = None
    help: str = ""

    @property
    def type(self) -> Any:
        """Type of a value other than None."""
        kinds = get_args(self.kind)
        return next(kind for kind in kinds if kind is not NoneType) if NoneType in kinds else self.kind

    @property
    def choices(self) -> tuple[Any, ...]:
        """Allowed values of a literal type."""
        kinds = (self.type, *get_args(self.type))
        return tuple(word for kind in kinds for word in get_args(kind) if isinstance(word, str | int))

    @property
    def is_numeric(self) -> bool:
        """Whether a value is written as a number."""
        return self.unit != "bytes" and (
            self.type in (int, float) or any(isinstance(word, int) for word in self.choices)
        )

    @property
    def range(self) -> str:
        """Description of the valid values, in words."""
        if self.expected:
            return self.expected
        if self.choices:
            *words, last = map(repr, self.choices)
            return f"{', '.join(words)} or {last}"
        if self.above is not None:
            return f"above {self.above}" + ("" if self.most is None else f" and at most {self.most}")
        return f"{self.least} or above" if self.most is None else f"between {self.least} and {self.most}"

    def range_error(self, value: Any) -> str:
        """Return the expected range or kind if a value of the right type violates it, else ""."""
        if value in self.choices or (value is None and self.default is None):
            return ""
        if self.kind == tuple[str, ...]:
            unicode = "" if all(map(is_unicode, value)) else "valid Unicode text"
            return unicode if all(value) else "strings that are not empty"
        least, above, most = self.least, self.above, self.most
        if self.choices and (least is None or not isinstance(value, int)):
            return self.range
        if not isinstance(value, int | float) or least is above is most is None:
            return ""
        within = (least is None or value >= least) and (above is None or value > above)
        return "" if within and (value < math.inf if most is None else value <= most) else self.range


machine = partial(Setting, group=MACHINE, commands=PLANS)
drafting = partial(Setting, group=DRAFT, commands=RUNS)
sampling = partial(Setting, group=SAMPLING, commands=RUNS)
rule = partial(Setting, group=RULES, commands=("generate",))
output = partial(Setting, group=OUTPUT)

_DECLARED: dict[type, dict[str, Setting]] = {}


def declared(kind: type[T]) -> type[T]:
    """Register the settings of a dataclass and reduce its fields and signature to plain types."""
    found, signature = dict[str, Setting](), kind.__init__.__annotations__
    # python -OO strips docstrings; the help is then empty.
    texts = dict(
        re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", inspect.cleandoc(kind.__doc__ or ""), re.MULTILINE)
    )
    for field in fields(kind):  # type: ignore[arg-type] # a dataclass
        plain, setting = get_args(field.type)
        field.type = signature[field.name] = plain
        option = setting.option or field.name.replace("_", "-")
        named = replace(setting, name=field.name, kind=plain, default=field.default, option=option)
        found[field.name] = replace(named, help=" ".join(texts.get(field.name, "").split()))
    _DECLARED[kind] = {name: found[name] for name in (*texts, *found) if name in found}
    return kind


def settings_of(kind: type) -> dict[str, Setting]:
    """Return the settings of a dataclass by name, in the order of its docstring and of the options."""
    return _DECLARED[kind]


def check_settings(record: Any) -> None:
    """Convert every field of a dataclass to its type and check its range. Raises RequestError."""
    read_fields(record)
    for name, setting in settings_of(type(record)).items():
        value = getattr(record, name)
        if wanted := setting.range_error(value):
            because = f": {setting.reason}" if setting.reason else ""
            raise RequestError(f"{name} must be {wanted}, not {short_repr(value)}{because}", field=name)


def check_keywords(
    given: Iterable[str], known: Collection[str], what: str, elsewhere: Mapping[str, Collection[str]]
) -> None:
    """Raise TypeError for the first unknown keyword.

    Args:
        given: Names as the caller wrote them.
        known: Valid names.
        what: Noun for such a keyword, such as "setting".
        elsewhere: Names that belong to another call, keyed by a hint that names the call; "{}" stands for
            the name.
    """
    for name in given:
        if name not in known:
            raise TypeError(f"unknown {what} {name!r}: {_hint(name, known, elsewhere)}")


def _hint(name: str, known: Collection[str], elsewhere: Mapping[str, Collection[str]]) -> str:
    from difflib import get_close_matches

    places = {each: place for place, names in elsewhere.items() for each in names}
    near = [name] if name in places else get_close_matches(name, [*known, *places], n=1)
    if not near:
        return f"valid names are {', '.join(known)}"
    meant = [] if near == [name] else [f"did you mean {near[0]!r}?"]
    place = [] if near[0] in known else [places[near[0]].format(near[0])]
    return " ".join(meant + place)
