"""Texts of errors and notices, with settings rewritten as command-line options.

In the packages below `ui`, a message names a setting as in Python, in backticks: `memory`, `draft="none"`.
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
)  # options that are not fields of EngineConfig
_OPTIONS = {name: name.replace("_", "-") for name in _OTHERS} | {"folder": "path"}
_OPTIONS |= {name: setting.option for name, setting in settings_of(EngineConfig).items()}
_SETTING = re.compile(rf"`({'|'.join(_OPTIONS)})(?:=\"?([^`\"]*)\"?)?`")
_PIP = re.compile(r"\bpip (install|uninstall)\b")
# Files that mark a single-program environment of an installer, which `pip` on PATH does not see.
_INSTALLERS = {
    "pipx_metadata.json": "pipx runpip offspec {}",
    "uv-receipt.toml": "uv pip {} --python {prefix}",
}
_PARAMETERS = (*SamplingParams.__dataclass_fields__, *settings_of(EngineConfig))
_PARAMETER = re.compile(rf"(?:^|(?<=between 0 and ))({'|'.join(_PARAMETERS)})(?= must be | \()")


def user_message(about: BaseException | Notice) -> str:
    """Return the printable text of an error or a notice for a user of the command line."""
    return printable(with_installer(with_options(about.text if isinstance(about, Notice) else str(about))))


def with_installer(text: str) -> str:
    """Rewrite pip commands for this environment: pipx and uv have their own."""
    return _PIP.sub(_installer, text)


def with_options(text: str) -> str:
    """Replace names of settings by options."""
    return _SETTING.sub(_option, text)


def option_first(text: str) -> str:
    """Replace a parameter at the beginning of a text, and one that limits it, by their options."""
    return _PARAMETER.sub(lambda found: "--" + _OPTIONS.get(found[1], found[1].replace("_", "-")), text)


def _installer(command: re.Match[str]) -> str:
    prefix = Path(sys.prefix)
    form = next((form for file, form in _INSTALLERS.items() if (prefix / file).is_file()), "pip {}")
    return form.format(command[1], prefix=prefix)


def _option(setting: re.Match[str]) -> str:
    name, value = setting.groups()
    return f"--{_OPTIONS[name]}" + ("" if value in (None, "True") else f" {value}")
