"""Messages name settings as Python does; the command line shows its options instead."""

import re
import sys
from pathlib import Path

import pytest

import offspec
from offspec import Notice, RequestError, SamplingParams
from offspec.ui.messages import option_first, user_message

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
    assert user_message(RequestError(text)) == user_message(Notice(text)) == shown


def test_parameters_of_an_error_are_shown_as_options() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(min_tokens=999, max_tokens=256)
    assert str(caught.value) == "min_tokens must be between 0 and max_tokens (256), not 999"
    assert option_first(str(caught.value)) == "--min-tokens must be between 0 and --max-tokens (256), not 999"


@pytest.mark.parametrize(
    ("file", "shown"),
    [
        (None, "pip uninstall -y torch && pip install 'torch'"),
        (
            "pipx_metadata.json",
            "pipx runpip offspec uninstall -y torch && pipx runpip offspec install 'torch'",
        ),
        (
            "uv-receipt.toml",
            "uv pip uninstall --python {prefix} -y torch && uv pip install --python {prefix} 'torch'",
        ),
    ],
)
def test_remedies_install_into_the_environment_of_offspec(
    file: str | None, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pip` on PATH belongs to another environment if pipx or uv installed offspec."""
    if file is not None:
        (tmp_path / file).touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    text = "pip uninstall -y torch && pip install 'torch'"
    assert user_message(RequestError(text)) == shown.format(prefix=tmp_path)


def test_messages_of_the_library_name_no_options() -> None:
    """They name whole commands; the doctor's findings are made for its command."""
    apart = ("ui/", "engine/doctor/")
    command = r"`[^`]*--[^`]*`|pip install [^`\"]*|ulimit [^`\"]*|\"--(to|out)\""
    for file in sorted(ROOT.rglob("*.py")):
        if file.relative_to(ROOT).as_posix().startswith(apart):
            continue
        for line in file.read_text("utf-8").splitlines():
            rest = re.sub(command, "", line)
            assert not re.search(r"(?<![-\w])--[a-z][a-z-]+", rest), f"{file}: {line}"
