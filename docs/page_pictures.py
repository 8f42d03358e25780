"""Draw the pictures of the server's page: the real page in a browser, over an engine that follows a script.

python docs/page_pictures.py [FOLDER]    write page.png and page-phone.png, into docs/images by default

Needs Debian's `chromium`. Pixels depend on its version and on fonts, so nothing checks these pictures.
"""

import sys
import tempfile
from collections.abc import Generator
from io import BytesIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from PIL import Image  # noqa: E402

from docs import pictured  # noqa: E402
from offspec.core.events import Event, PassStats, TextDelta, TreeSeen  # noqa: E402
from tests.support.browser import Browser, Page  # noqa: E402
from tests.support.fake_engine import ScriptedEngine  # noqa: E402
from tests.support.live_server import LiveServer  # noqa: E402

_VIEWS = {"page": (1280, 800, "light"), "page-phone": (390, 800, "dark")}
_NOTES = ["81 tokens in 64.2 s", "52 tokens in 41.5 s"]  # a script takes no time
_IDLE = "(send => send.textContent == 'Send' && !send.disabled)(document.getElementById('send'))"


class _Pictured(ScriptedEngine):
    """Engine with the trees and passes of the pictures of the terminal."""

    def stream(self, *given: Any, **named: Any) -> Generator[Event, None, None]:
        passes = iter(pictured.passes())
        for event in super().stream(*given, **named):
            match event:
                case TextDelta():
                    yield event
                case TreeSeen(index=index):
                    yield pictured.tree(index)
                case PassStats():
                    yield from (each for each in (next(passes, None),) if each is not None)
                case _:
                    yield event


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images"
    # A terminal's samples have line breaks in their paragraphs.
    answers = [text.replace("is\n  what", "is what") for text in pictured.ANSWERS]
    with (
        tempfile.TemporaryDirectory() as profile,
        LiveServer(_Pictured(answers, template="</think>"), served_model_names=("llama-3.1-70b",)) as server,
        Browser(Path(profile)) as browser,
    ):
        for name, (width, height, scheme) in _VIEWS.items():
            page = browser.open(server.url, width, scheme)
            page.set_viewport(width, height, scheme)
            _talk(page, panel=width > height)
            picture = Image.open(BytesIO(page.screenshot())).convert("RGB").quantize(128)
            picture.save(folder / f"{name}.png", optimize=True)


def _talk(page: Page, panel: bool) -> None:
    page.wait(_IDLE)
    if panel:
        page.value("document.getElementById('panel-button').click()")
    for count, question in enumerate(pictured.QUESTIONS, 1):
        page.wait(_IDLE)
        page.value("document.getElementById('question').focus()")
        page.write(question)
        page.press("Enter")
        page.wait(f"{_IDLE} && document.querySelectorAll('.answer').length == {count}")
    page.value(f"document.querySelectorAll('.note').forEach((note, at) => note.textContent = {_NOTES}[at])")
    page.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


if __name__ == "__main__":
    main()
