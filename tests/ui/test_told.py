"""Messages name settings as Python does; the command line shows its options in their place."""

import re
from pathlib import Path

import pytest

import offspec
from offspec import Notice, RequestError
from offspec.ui.told import told

ROOT = Path(offspec.__file__).parent


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("load with a larger `context`", "load with a larger --context"),
        ('use `device="cpu"`, or less `kv_cache`', "use --device cpu, or less --kv-cache"),
        ("plain text with `raw=True`", "plain text with --raw"),
        ("give `tokens=2000` or `temperature=0`", "give --tokens 2000 or --temperature 0"),
        ("other files in `corpus`, or a `folder`", "other files in --draft-corpus, or a --path"),
        ("run `hf auth login`, or take `demo`", "run `hf auth login`, or take `demo`"),
    ],
)
def test_settings_are_shown_as_options(text: str, shown: str) -> None:
    assert told(RequestError(text)) == told(Notice(text)) == shown


def test_no_message_below_the_interface_names_an_option() -> None:
    """Commands do, whole ones; the doctor's findings are made for its command."""
    apart = ("ui/", "engine/doctor/")
    command = r"`[^`]*--[^`]*`|pip install [^`\"]*|ulimit [^`\"]*|\"--(to|out)\""
    for file in sorted(ROOT.rglob("*.py")):
        if file.relative_to(ROOT).as_posix().startswith(apart):
            continue
        for line in file.read_text("utf-8").splitlines():
            rest = re.sub(command, "", line)
            assert not re.search(r"(?<![-\w])--[a-z][a-z-]+", rest), f"{file}: {line}"
