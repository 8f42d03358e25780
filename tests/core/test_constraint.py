"""Invalid constraints are rejected before a model is loaded."""

import subprocess
import sys

import pytest

from offspec.core.config import SamplingParams
from offspec.core.constraint import Constraint
from offspec.core.errors import RequestError


@pytest.mark.parametrize(
    ("regex", "error"),
    [
        ("[a-", "unclosed character class at character 1, '[a-'"),
        ("ab(c", "unclosed group at character 3, '(c'"),
        ("a)b", "unopened group at character 2, ')b'"),
        ("*a", "repetition operator missing expression at character 1, '*a'"),
        ("x[z-a]", "invalid character class range, the start must be <= the end at character 3, 'z-a]'"),
        ("a/\t/\n(b", "unclosed group at character 6, '(b'"),
        (r"\d/\/\p{Foo}", r"Unicode property not found at character 6, '\\p{Foo}'"),
        ("ä(", "unclosed group at character 2, '('"),
        (
            "a(?=b)",
            "look-around, including look-ahead and look-behind, is not supported at character 2, '(?=b)'",
        ),
        (r"(a)\1", r"backreferences are not supported at character 4, '\\1'"),
        ("a\\", "incomplete escape at character 2"),
        ("x" * 10_000 + "(", "unclosed group at character 10001, '('"),
    ],
)
def test_invalid_regex_is_refused_with_its_position(regex: str, error: str) -> None:
    for make in (
        lambda: Constraint("regex", regex),
        lambda: SamplingParams(format={"kind": "regex", "text": regex}),
    ):
        with pytest.raises(RequestError) as raised:
            make()
        text = str(raised.value)
        assert text.startswith("invalid regex ") and text.endswith(f": {error}")
        assert "\n" not in text and len(text) < 300


@pytest.mark.parametrize("regex", ["a+", r"a\\", "[a-z]{2,5}|/", r"\d+\.\d*", "a\nb", r"\p{L}+", "(?i)yes"])
def test_valid_regex_is_accepted(regex: str) -> None:
    assert Constraint("regex", regex).text == regex


def test_regex_is_checked_without_torch() -> None:
    program = (
        "import sys\nfrom offspec.core.constraint import Constraint\n"
        "try:\n    Constraint('regex', '(a')\nexcept Exception as error:\n    print(error)\n"
        "print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "invalid regex '(a': unclosed group at character 1, '(a'\nFalse\n"


def test_command_refuses_an_invalid_regex_before_loading() -> None:
    """No such model exists, so the error of the regular expression must come first."""
    command = [sys.executable, "-m", "offspec", "generate", "./no-such-model", "Hi", "--regex", "(a"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2
    assert "invalid regex '(a': unclosed group at character 1" in run.stderr
