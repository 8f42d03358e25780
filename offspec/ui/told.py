"""What errors and notices say, with settings named as options of the command line.

Below `ui` a message names a setting as Python does, in backticks: `memory`, `draft="none"`.
"""

import re
import sys
from pathlib import Path

from offspec.core.config import EngineConfig, SamplingParams
from offspec.core.events import Notice
from offspec.core.setting import settings_of
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
    "cors_origin",
    "seconds",
    "greedy",
)  # no fields of EngineConfig
_OPTIONS = {name: name.replace("_", "-") for name in _OTHERS} | {"folder": "path"}
_OPTIONS |= {name: setting.option for name, setting in settings_of(EngineConfig).items()}
_SETTING = re.compile(rf"`({'|'.join(_OPTIONS)})(?:=\"?([^`\"]*)\"?)?`")
_PIP = re.compile(r"\bpip (install|uninstall)\b")
# Files of the environments that installers make for one program, in which `pip` on PATH would miss it.
_INSTALLERS = {
    "pipx_metadata.json": "pipx runpip offspec {}",
    "uv-receipt.toml": "uv pip {} --python {prefix}",
}
_PARAMETER = re.compile(rf"^({'|'.join(SamplingParams.__dataclass_fields__)})(?= must be )")


def told(about: BaseException | Notice) -> str:
    """The text of an error or a notice for a user of the command line, printable."""
    return printable(with_installer(with_options(about.text if isinstance(about, Notice) else str(about))))


def with_installer(text: str) -> str:
    """The same text with pip's commands as this environment has them: pipx and uv install with their own."""
    return _PIP.sub(_installer, text)


def with_options(text: str) -> str:
    """The same text with options for the settings that it names."""
    return _SETTING.sub(_option, text)


def option_first(text: str) -> str:
    """The same text, where it begins with a parameter of the answer, with its option."""
    return _PARAMETER.sub(lambda found: "--" + found[1].replace("_", "-"), text)


def _installer(command: re.Match[str]) -> str:
    prefix = Path(sys.prefix)
    form = next((form for file, form in _INSTALLERS.items() if (prefix / file).is_file()), "pip {}")
    return form.format(command[1], prefix=prefix)


def _option(setting: re.Match[str]) -> str:
    name, value = setting.groups()
    return f"--{_OPTIONS[name]}" + ("" if value in (None, "True") else f" {value}")
