"""`/copy code`."""

import pytest

from offspec.chat.archive import SessionArchive
from offspec.core.errors import RequestError
from offspec.ui.chat.command_results import CopyToClipboard
from offspec.ui.chat.controller import ChatController
from offspec.ui.chat.handlers import CodeBlock, code_blocks, run_command
from tests.support.fake_engine import ScriptedEngine
from tests.ui.chat.talk import SETUP, say

ANSWERS = (
    "<think>\n```\nno\n```\n</think>\n```python\nx = 1\n\ny = 2\n```\n",
    "No code.",
    "1. Run\n   ```sh -x\n   ls\n   ```\n2. Then\n\n~~~\n```\nopen\n",
)


def test_code_blocks_are_counted_from_the_last_answer(archive: SessionArchive) -> None:
    chat = ChatController(ScriptedEngine(ANSWERS), SETUP, archive)
    with pytest.raises(RequestError, match="no answer has a block of code"):
        run_command(chat, "/copy code")
    for _ in ANSWERS:
        say(chat, "Why?")
    assert run_command(chat, "/copy code") == CopyToClipboard("```\nopen", "block 3 of 3, 2 lines of code")
    assert run_command(chat, "/copy code 2") == CopyToClipboard("ls", "block 2 of 3, 1 line of sh")
    assert run_command(chat, "/copy code 3") == CopyToClipboard(
        "x = 1\n\ny = 2", "block 1 of 3, 3 lines of python"
    )
    with pytest.raises(RequestError, match="only 3 blocks of code; /copy code 3 copies the first"):
        run_command(chat, "/copy code 4")
    with pytest.raises(RequestError, match="'x' is not a number above 0; /copy code 2 copies"):
        run_command(chat, "/copy code x")
    with pytest.raises(RequestError, match="'codex' is not a number"):
        run_command(chat, "/copy codex")


def test_detection_of_code_blocks() -> None:
    assert code_blocks("`x` and\n\n    indented\n\n```\n\n```\n") == [CodeBlock("", "indented")]
