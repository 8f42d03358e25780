"""What errors and notices say, with settings named as options of the command line.

Below `ui` a message names a setting as Python does, in backticks: `memory`, `draft="none"`.
"""

import re

from offspec.core.config import EngineConfig, SamplingParams
from offspec.core.events import Notice
from offspec.ui.printable import printable

_OTHERS = (
    "plan",
    "hardware",
    "raw",
    "check",
    "out",
    "tokens",
    "prompts",
    "host",
    "port",
)  # no fields of EngineConfig
_OPTIONS = {name: name.replace("_", "-") for name in (*EngineConfig.__dataclass_fields__, *_OTHERS)}
_OPTIONS |= {"corpus": "draft-corpus", "folder": "path"}
_SETTING = re.compile(rf"`({'|'.join(_OPTIONS)})(?:=\"?([^`\"]*)\"?)?`")
_PARAMETER = re.compile(rf"^({'|'.join(SamplingParams.__dataclass_fields__)})(?= must be )")


def told(about: BaseException | Notice) -> str:
    """The text of an error or a notice for a user of the command line, printable."""
    return printable(with_options(about.text if isinstance(about, Notice) else str(about)))


def with_options(text: str) -> str:
    """The same text with options for the settings that it names."""
    return _SETTING.sub(_option, text)


def option_first(text: str) -> str:
    """The same text, where it begins with a parameter of the answer, with its option."""
    return _PARAMETER.sub(lambda found: "--" + found[1].replace("_", "-"), text)


def _option(setting: re.Match[str]) -> str:
    name, value = setting.groups()
    return f"--{_OPTIONS[name]}" + ("" if value in (None, "True") else f" {value}")
