"""Names of commands, parsing, and messages to the user."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offspec.core.errors import RequestError
from offspec.ui.chat.commands import COMMANDS, command_help, escaped, find, is_command, parse, unescaped
from offspec.ui.chat.handlers import ACTIONS


def test_every_command_has_a_handler_and_a_description() -> None:
    assert list(ACTIONS) == list(COMMANDS)
    for name, command in COMMANDS.items():
        assert command.name == name
        assert command.usage.split()[0] == f"/{name}"
        assert command.help.endswith((".", "it.")) and "\n" not in command.help
        assert command.help in command_help(name) and command.usage in command_help(f"/{name}")
        assert "\n" not in command_help(name).replace("\n\n", ""), (
            "a newline within a paragraph would be shown"
        )


@pytest.mark.parametrize(
    ("line", "name", "argument"),
    [
        ("/help", "help", ""),
        ("/set  temperature=0.7 ", "set", "temperature=0.7"),
        ("/QUIT", "quit", ""),
        ("/exit", "quit", ""),
        ("/edit\nWhy?\nHow?", "edit", "Why?\nHow?"),
    ],
)
def test_parse(line: str, name: str, argument: str) -> None:
    assert is_command(line)
    command, rest = parse(line)
    assert (command.name, rest) == (name, argument)


def test_lines_that_are_questions() -> None:
    for line in ("", "/", "//help", " /help", "/usr/bin/env is missing", "/* c */", "/2 + 2", "Why?"):
        assert not is_command(line), line


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("//help me", "/help me"),
        ("//Exit", "/Exit"),
        ("///quit", "//quit"),
        ("// a comment\nint x;", "// a comment\nint x;"),
        ("//helpful", "//helpful"),
        ("/usr/bin", "/usr/bin"),
    ],
)
def test_double_slash_escapes_a_command(typed: str, said: str) -> None:
    assert unescaped(typed) == said
    assert escaped(said) == typed


@given(st.text("/aqut ", max_size=8) | st.sampled_from(["/quit", "//new x", "///help", "/TODO"]))
def test_returned_questions_are_never_run_as_commands(text: str) -> None:
    assert unescaped(escaped(text)) == text
    if is_command(escaped(text)):
        with pytest.raises(RequestError, match="unknown command"):
            parse(escaped(text))


def test_unknown_command_suggests_the_nearest() -> None:
    with pytest.raises(
        RequestError, match=r"unknown command /hlep; did you mean /help\? .* start the line with a space"
    ):
        parse("/hlep")
    with pytest.raises(
        RequestError, match=r"unknown command /xyzzy; see /help. .* start the line with a space"
    ):
        find("xyzzy")
    with pytest.raises(RequestError, match="a slash and a name"):
        parse("hello")


@pytest.mark.parametrize(
    ("line", "near"),
    [
        ("/top-p 5", "/set top_p 5"),
        ("/top_p 5", "/set top_p 5"),
        ("/Temperature", "/set temperature"),
        ("/stop The end", "/set stop"),
        ("/re-try", "/retry"),
        ("/undo2", "/undo"),
    ],
)
def test_an_unknown_name_with_other_signs_is_refused_and_never_sent(line: str, near: str) -> None:
    assert is_command(line)
    with pytest.raises(RequestError, match=rf"unknown command /\S+; did you mean {near}\? To send it"):
        parse(line)
