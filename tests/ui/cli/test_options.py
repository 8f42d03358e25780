"""Options that commands declare in their signature and docstring."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command

from offspec.ui.cli.main import app
from offspec.ui.cli.options import _read_docstring


def _commands(group: Any) -> Iterator[Any]:
    yield group
    for command in getattr(group, "commands", {}).values():
        yield from _commands(command)


@pytest.mark.parametrize("command", _commands(get_command(app)), ids=lambda command: str(command.name))
def test_docstrings_describe_exactly_the_options(command: Any) -> None:
    function = inspect.unwrap(command.callback)
    text = inspect.cleandoc(function.__doc__ or "")
    _, documented = _read_docstring(text)
    assert documented.keys() <= inspect.signature(function).parameters.keys()
    assert len(documented) == len(re.findall(r"^    (?=\S)", text, re.MULTILINE)), "an entry in another form"
    assert all(option.help for option in command.params)
