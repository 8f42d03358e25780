"""Every character that a terminal sends is in the text, whichever widget has the keys."""

import json
import sys
import unicodedata
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from offspec.chat.archive import Archive
from offspec.chat.conversation import Conversation
from offspec.ui.tui.app import ChatApp
from offspec.ui.tui.typed_text import TerminalDecoder
from tests.support.tmux import HAS_TMUX, Tmux
from tests.ui.cli.program import DRIVER, ROOT
from tests.ui.tui.stage import PlannedEngine, loaded, plays, said, send, type_as_terminal, until

PERSIAN = "می\u200cخواهم"
DEVANAGARI = "क्\u200dष"
FAMILY = "👩\u200d👩\u200d👧"
# One of every kind that is no control and not printable: marks of direction, spaces, tags, private use, new.
OTHERS = "a\u200fb\u00adc\u00a0d\u202fe\u3000g\ue000h\U000e0067i\U0001fbffj\ufeffk\u0378l"


@pytest.mark.parametrize("text", [PERSIAN, DEVANAGARI, FAMILY, OTHERS])
def test_what_is_typed_reaches_the_model(text: str, tmp_path: Path) -> None:
    @plays("Yes.")
    async def scene(pilot: Pilot[None], app: ChatApp, engine: PlannedEngine) -> None:
        await loaded(pilot)
        type_as_terminal(pilot, text)
        await until(pilot, lambda: app.composer.text == text)
        await pilot.press("enter")
        await until(pilot, lambda: app.answer is None and bool(engine.asked))
        assert said(app)[0] == ("question", text)
        assert text in engine.wording.spell(engine.asked[0].prompt)

    scene(tmp_path=tmp_path)


@plays("Yes.")
async def test_no_character_vanishes(pilot: Pilot[None], app: ChatApp) -> None:
    await loaded(pilot)
    one_of_each = {unicodedata.category(sign): sign for sign in map(chr, range(sys.maxunicode + 1))}
    text = "".join(sign for kind, sign in one_of_each.items() if kind not in ("Cc", "Cs", "Zl", "Zp"))
    type_as_terminal(pilot, f"{text}\u2028{text}\u2029{text}")
    await until(pilot, lambda: app.composer.text == "\n".join([text] * 3))  # ends of lines are newlines


@plays("Yes.")
async def test_nor_in_other_inputs(pilot: Pilot[None], app: ChatApp) -> None:
    await loaded(pilot)
    await send(pilot, "/sessions")
    await until(pilot, lambda: len(app.screen_stack) == 2)
    type_as_terminal(pilot, FAMILY + PERSIAN)
    await until(pilot, lambda: app.screen.query_one(Input).value == FAMILY + PERSIAN)


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        ("b\x7fd", "d"),
        ("ab\x7fc\x15d\x00\x1d", "d"),
        ("bc\x1b[D\x1b[Da", "abc"),
        ("one two\x17three", "one three"),
        ("world\x01hello \x05!", "hello world!"),
    ],
)
def test_keys_act_in_the_order_in_which_they_came(typed: str, text: str, tmp_path: Path) -> None:
    @plays("Yes.")
    async def scene(pilot: Pilot[None], app: ChatApp) -> None:
        await loaded(pilot)
        type_as_terminal(pilot, typed)
        await pilot.pause(0.3)
        assert app.composer.text == text

    scene(tmp_path=tmp_path)


PASTED = "\x1b[31mred\rand \x1b[0m\tplain \x1b"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 100])
def test_an_escape_within_a_paste_is_no_key(size: int) -> None:
    typed = f"\x1b[Da\x1b\x1b[200~{PASTED}\x1b[201~\x1b[C\x1b[200~b\x1b[201~é\x1b".encode()
    decoder = TerminalDecoder()
    text = "".join(decoder.decode(typed[at : at + size]) for at in range(0, len(typed), size))
    shown = PASTED.replace("\x1b", "\ufffd")
    assert text == f"\x1b[Da\x1b\x1b[200~{shown}\x1b[201~\x1b[C\x1b[200~b\x1b[201~é\x1b"


def question_after(typed: bytes, tmp_path: Path) -> str:
    """The question in the session file after these bytes came from a terminal."""
    script = json.dumps({"answers": ["Yes."]})
    variables = {"OFFSPEC_DATA": str(tmp_path), "PYTHONPATH": str(ROOT)}
    with Tmux([sys.executable, "-m", DRIVER, script, "chat", "demo"], variables) as terminal:
        terminal.wait_for("Enter sends")
        terminal.type_bytes(typed)
        terminal.wait_for("Yes.")
        (entry,) = Archive(tmp_path / "sessions").list()
        question, _ = Conversation.read(entry.file).messages
        return question.content


@pytest.mark.skipif(not HAS_TMUX, reason="tmux is not installed")
def test_text_with_an_escape_is_pasted_whole(tmp_path: Path) -> None:
    typed = f"one \x1b[200~{PASTED}\x1b[201~two\r".encode()
    assert question_after(typed, tmp_path) == "one \ufffd[31mred\nand \ufffd[0m\tplain \ufffdtwo"


@pytest.mark.skipif(not HAS_TMUX, reason="tmux is not installed")
def test_a_byte_that_is_not_text_does_not_end_the_chat(tmp_path: Path) -> None:
    typed = b"caf\xe9? " + PERSIAN.encode() + b"\r"
    assert question_after(typed, tmp_path) == f"caf\ufffd? {PERSIAN}"
