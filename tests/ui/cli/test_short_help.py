"""`--help` shows the main options, `--help-all` shows all of them."""

import re

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from offspec.ui.cli.main import app
from offspec.ui.cli.short_help import MAIN_OPTIONS


def shown(*words: str) -> set[str]:
    """Options in the first column of a help text."""
    found = CliRunner().invoke(app, words, env={"COLUMNS": "120"})
    assert found.exit_code == 0, found.output
    return set(re.findall(r"^│ \*? *(--[a-z-]+)", found.output, re.MULTILINE))


def options(command: str) -> set[str]:
    params = get_command(app).commands[command].params  # type: ignore[attr-defined] # a group
    return {param.opts[0] for param in params if param.param_type_name == "option"}


@pytest.mark.parametrize("command", MAIN_OPTIONS)
def test_help_shows_main_options_and_help_all_shows_all(command: str) -> None:
    main = {f"--{name}" for name in MAIN_OPTIONS[command]}
    assert main <= options(command), "an option in the table that the command does not have"
    assert shown(command, "--help") == main | {"--help", "--help-all"}
    assert shown(command, "--help-all") == options(command) | {"--help"}
    assert len(main) <= 16, "a short help"


def test_commands_with_few_options_show_them_all() -> None:
    assert shown("pack", "--help") == options("pack") - {"--help-all"} | {"--help"}
    assert shown("pack", "--help-all") == shown("pack", "--help")


@pytest.mark.parametrize(
    "words", ["", "config", "config set", "config list", "models", "models pull", "hardware", "plan list"]
)
def test_every_command_has_a_whole_help(words: str) -> None:
    assert {"--help"} <= shown(*words.split(), "--help-all")


def test_help_all_after_a_double_dash_is_a_value() -> None:
    assert (
        "unknown key '--help-all'"
        in CliRunner().invoke(app, ["config", "set", "--", "--help-all", "1"]).output
    )


def test_no_flag_shows_a_type() -> None:
    for words in ([], ["models"], ["config"], ["models", "pull"], ["config", "set"], ["chat"]):
        assert "<bool>" not in CliRunner().invoke(app, [*words, "--help"]).output
