"""A conversation in many scripts: on the screen, in its file, and as the model was asked."""

import functools
import re
from pathlib import Path

from textual.pilot import Pilot

from offspec.chat.archive import Archive
from offspec.chat.conversation import Conversation
from offspec.ui.tui.app import ChatApp
from tests.ui.tui.stage import app_for, loaded, play, seen, settled, type_as_terminal, until

SCRIPTS = [
    "می‌خواهم درباره‌ی آسمان بپرسم\nکتاب‌های خوب کدام‌اند؟",
    "क्‍या आसमान नीला है?\nर्‍य के साथ लिखो",
    "ทำไมท้องฟ้าถึงเป็นสีฟ้า\nน้ำใจและเพื่อนที่ดี",
]
EMOJI = ["👩‍👩‍👧 and 🏳️‍🌈", "👍🏽 🇮🇳 ❤️‍🔥 1️⃣ one 🧑🏿‍🚀"]
OTHERS = [
    "prix : 10\u202f000\u00a0€\n空\u3000白\nsoft\u00adhyphen",
    "שלום\u200f!\ne\u0301tude, é\n𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \ue000",
]
POEMS = ["An old silent pond\nA frog jumps into the pond\nSplash! Silence again", "1 Main Street\nNowhere"]
CODE = ["```python\nfor i in range(3):\n    print(i)\n```", "```\na  b\n  c\n```"]
TABLES = ["| a | b |\n|---|---|\n| 1 | 2 |", "| ไทย | می‌خواهم |\n|---|---|\n| ก | क्ष |"]
LISTS = ["- one\n- two\n- three", "1. first\n2. second", "**bold** and *slanted*\n`code` here"]

TEXTS = [*SCRIPTS, *EMOJI, *OTHERS, *POEMS, *CODE, *TABLES, *LISTS]
_RULES = ("```", "|---|")  # lines of Markdown that are not shown as they are
_MARKS = re.compile(r"^- |^\d\. |\*+|`")


def missing(text: str, screen: str, *, drawn: bool) -> list[str]:
    """Lines of a text that are no ends of lines of the screen; drawn: as Markdown, without its marks.

    Of what has columns, the cells that are nowhere.
    """
    lines = text.split("\n")
    if not drawn:
        return _not_at_ends(lines, screen)
    lines = [_MARKS.sub("", line) for line in lines if not line.startswith(_RULES)]
    if "|" not in text:
        return _not_at_ends(lines, screen)
    return [cell for line in lines for cell in line.split("|") if cell.strip() not in screen]


def _not_at_ends(lines: list[str], screen: str) -> list[str]:
    shown = [line.rstrip() for line in screen.split("\n")]
    return [line for line in lines if not any(end.endswith(line.strip()) for end in shown)]


def test_nothing_is_lost_on_any_way(tmp_path: Path) -> None:
    """Questions are typed key by key, every second one is pasted; answers are the texts in reverse order."""
    answers = TEXTS[::-1]
    app, engine = app_for(answers, tmp_path)

    async def scene(pilot: Pilot[None]) -> None:
        await loaded(pilot)
        for number, (question, answer) in enumerate(zip(TEXTS, answers, strict=True)):
            await say(pilot, app, question, pasted=bool(number % 2))
            screen = seen(app)
            lost = missing(question, screen, drawn=False) + missing(answer, screen, drawn=True)
            assert not lost, f"{lost} of turn {number} are not in\n{screen}"

    play(app, scene, size=(96, 60))
    (entry,) = Archive(tmp_path).list()
    kept = Conversation.read(entry.file).messages
    said = [text for turn in zip(TEXTS, answers, strict=True) for text in turn]
    assert [message.content for message in kept] == said
    for number, asked in enumerate(engine.asked):
        prompt = engine.wording.spell(asked.prompt)
        roles = ("user", "assistant")
        turns = [{"role": roles[at % 2], "content": text} for at, text in enumerate(said[: 2 * number + 1])]
        assert prompt == engine.wording.render(turns)


async def say(pilot: Pilot[None], app: ChatApp, text: str, *, pasted: bool) -> None:
    """Send it as a terminal does, and wait for the whole answer."""
    assert app.controller is not None
    turns = app.controller.session.conversation.turns + 1
    keys = f"\x1b[200~{text.replace(chr(10), chr(13))}\x1b[201~" if pasted else text
    type_as_terminal(pilot, f"{keys}\r")
    await until(pilot, functools.partial(_is_over, app, turns))
    await settled(pilot)


def _is_over(app: ChatApp, turns: int) -> bool:
    assert app.controller is not None
    return app.controller.session.conversation.turns == turns and app.answer is None
