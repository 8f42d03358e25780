"""Every character sent by a terminal reaches the text, whichever widget has the focus."""

import json
import sys
import unicodedata
from functools import partial
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from offspec.chat.archive import SessionArchive
from offspec.chat.conversation import Conversation
from offspec.ui.tui.app import ChatApp
from offspec.ui.tui.terminal_decoder import TerminalDecoder
from tests.support.tmux import HAS_TMUX, Tmux
from tests.ui.cli.program import DRIVER, ROOT
from tests.ui.tui.stage import loaded, plays, send, type_as_terminal, until

PERSIAN = "می\u200cخواهم"
FAMILY = "👩\u200d👩\u200d👧"


@plays("Yes.")
async def test_no_character_is_lost(pilot: Pilot[None], app: ChatApp) -> None:
    await loaded(pilot)
    one_of_each = {unicodedata.category(sign): sign for sign in map(chr, range(sys.maxunicode + 1))}
    text = "".join(sign for kind, sign in one_of_each.items() if kind not in ("Cc", "Cs", "Zl", "Zp"))
    type_as_terminal(pilot, f"{text}\u2028{text}\u2029{text}")
    await until(pilot, lambda: app.composer.text == "\n".join([text] * 3))  # line ends become newlines


@plays("Yes.")
async def test_no_character_is_lost_in_other_inputs(pilot: Pilot[None], app: ChatApp) -> None:
    await loaded(pilot)
    await send(pilot, "/sessions")
    await until(pilot, lambda: len(app.screen_stack) == 2)
    type_as_terminal(pilot, FAMILY + PERSIAN)
    await until(pilot, lambda: app.screen.query_one(Input).value == FAMILY + PERSIAN)


@plays("Yes.")
async def test_keys_act_in_order(pilot: Pilot[None], app: ChatApp) -> None:
    await loaded(pilot)
    for typed, text in (
        ("b\x7fd", "d"),
        ("ab\x7fc\x15d\x00\x1d", "d"),
        ("bc\x1b[D\x1b[Da", "abc"),
        ("one two\x17three", "one three"),
        ("world\x01hello \x05!", "hello world!"),
    ):
        app.composer.clear()
        type_as_terminal(pilot, typed)
        await pilot.pause()  # until all of them have acted
        assert app.composer.text == text


PASTED = "\x1b[31mred\rand \x1b[0m\tplain \x1b"


def test_escape_within_a_paste_is_not_a_key() -> None:
    typed = f"\x1b[Da\x1b\x1b[200~{PASTED}\x1b[201~\x1b[C\x1b[200~b\x1b[201~é\x1b".encode()
    shown = PASTED.replace("\x1b", "\ufffd")
    for size in (1, 2, 3, 5, 7, 100):
        decoder = TerminalDecoder()
        text = "".join(decoder.decode(typed[at : at + size]) for at in range(0, len(typed), size))
        assert text == f"\x1b[Da\x1b\x1b[200~{shown}\x1b[201~\x1b[C\x1b[200~b\x1b[201~é\x1b"


@pytest.mark.skipif(not HAS_TMUX, reason="tmux is not installed")
def test_paste_with_escapes_and_invalid_bytes(
    tmp_path: Path,
) -> None:
    script, archive = json.dumps({"answers": ["Yes."]}), SessionArchive(tmp_path / "sessions")
    variables = {"OFFSPEC_DATA": str(tmp_path), "PYTHONPATH": str(ROOT)}
    pasted = f"one \x1b[200~{PASTED}\x1b[201~two\r".encode()
    with Tmux([sys.executable, "-m", DRIVER, script, "chat", "demo"], variables) as terminal:
        terminal.wait_for("Enter sends")
        for number, typed in enumerate((pasted, b"caf\xe9? " + PERSIAN.encode() + b"\r"), 1):
            terminal.type_bytes(typed)
            terminal.wait_until(partial(has_answered, archive, number), f"{number} answers")
    assert answered(archive) == [
        "one \ufffd[31mred\nand \ufffd[0m\tplain \ufffdtwo",
        f"caf\ufffd? {PERSIAN}",
    ]


def answered(archive: SessionArchive) -> list[str]:
    """Return the questions with whole answers in the only session file."""
    messages = [message for entry in archive.list() for message in Conversation.read(entry.file).messages]
    pairs = zip(messages[::2], messages[1::2], strict=False)
    return [question.content for question, answer in pairs if answer.finish == "eos"]


def has_answered(archive: SessionArchive, count: int) -> bool:
    return len(answered(archive)) == count
