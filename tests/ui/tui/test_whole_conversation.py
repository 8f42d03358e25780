"""A conversation in many scripts: on the screen, in its file, and in the model's prompts."""

from functools import partial
from pathlib import Path

from textual.pilot import Pilot

from offspec.chat.archive import SessionArchive
from offspec.chat.conversation import Conversation
from tests.ui.tui.stage import answered, app_for, loaded, play, seen, settled, type_as_terminal, until

TEXTS = [
    "می‌خواهم درباره‌ی آسمان بپرسم\nکتاب‌های خوب کدام‌اند؟",
    "क्‍या आसमान नीला है?\nर्‍य के साथ लिखो",
    "ทำไมท้องฟ้าถึงเป็นสีฟ้า\nน้ำใจและเพื่อนที่ดี",
    "👩‍👩‍👧 and 🏳️‍🌈",
    "👍🏽 🇮🇳 ❤️‍🔥 1️⃣ one 🧑🏿‍🚀",
    "prix : 10\u202f000\u00a0€\n空\u3000白\nsoft\u00adhyphen",
    "שלום\u200f!\ne\u0301tude, é\n𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \ue000",
    "An old silent pond\nA frog jumps into the pond\nSplash! Silence again",
]


def test_no_text_is_lost(tmp_path: Path) -> None:
    """Questions are typed key by key, every second one is pasted; answers are the texts in reverse order."""
    answers = TEXTS[::-1]
    app, engine = app_for(answers, tmp_path)

    async def scene(pilot: Pilot[None]) -> None:
        await loaded(pilot)
        for turn, text in enumerate(TEXTS):
            pasted = f"\x1b[200~{text.replace(chr(10), chr(13))}\x1b[201~"
            type_as_terminal(pilot, f"{pasted if turn % 2 else text}\r")
            await until(pilot, partial(answered, app, turn + 1))
            await settled(pilot)
            shown = [line.rstrip() for line in seen(app).split("\n")]
            for line in [*text.split("\n"), *answers[turn].split("\n")]:
                assert any(end.endswith(line) for end in shown), line

    play(app, scene, size=(96, 60))
    (entry,) = SessionArchive(tmp_path).list()
    said = [text for turn in zip(TEXTS, answers, strict=True) for text in turn]
    assert [message.content for message in Conversation.read(entry.file).messages] == said
    roles = ("user", "assistant")
    turns = [{"role": roles[at % 2], "content": text} for at, text in enumerate(said)]
    for number, request in enumerate(engine.requests):
        assert engine.wording.decode_with_special(request.prompt) == engine.wording.render(
            turns[: 2 * number + 1]
        )
