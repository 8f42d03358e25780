"""Draw docs/images/run.svg: the real chat with a real model, after it has answered.

python docs/real_run.py                    the wide demo model, whose layers stream in 1.5 GB
python docs/real_run.py MODEL MEMORY       another model, such as demo 0.75GB

Its text and figures are those of the run, so no check compares this picture. `make docs` does not draw it.
"""

import asyncio
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from offspec.core.openmp import limit_spinning  # noqa: E402

limit_spinning()  # before torch is imported, as the program does

from textual.pilot import Pilot  # noqa: E402

from docs.screenshots import IMAGES, named, plain_environment  # noqa: E402
from offspec.chat.archive import SessionArchive  # noqa: E402
from offspec.core.config import EngineConfig  # noqa: E402
from offspec.core.sampling_defaults import SamplingOverrides  # noqa: E402
from offspec.core.values import parse_bytes  # noqa: E402
from offspec.ui.chat.setup import ChatSetup, open_engine  # noqa: E402
from offspec.ui.tui.app import ChatApp  # noqa: E402

QUESTION = "Explain in two sentences why the sky is blue."
_MODEL, _MEMORY = "demo-wide", "1.5GB"
_SIZE = (116, 30)
_LONGEST = 900.0  # seconds for loading, and for each answer


async def draw(model: str, memory: int, folder: Path) -> str:
    """The picture. memory: limit in bytes; folder: where the conversation is kept meanwhile."""
    config = EngineConfig(model=model, draft="auto", memory=memory, context=1024)
    app = ChatApp(
        ChatSetup(config, SamplingOverrides({"max_tokens": 240})), open_engine, SessionArchive(folder)
    )
    app.animation_level = "none"
    async with app.run_test(size=_SIZE) as pilot:
        await _until(pilot, lambda: app.controller is not None and not app.is_loading)
        assert app.controller is not None
        session = app.controller.session
        app.composer.text = QUESTION
        await pilot.press("enter")
        await _until(pilot, lambda: session.conversation.turns == 1)
        await _until(pilot, lambda: not session.busy and app.answer is None)
        app.composer.cursor_blink = False
        await pilot.pause(1.0)  # the last statistics are painted by a timer
        picture = app.export_screenshot(title=f"offspec chat {model}")
        app.exit()
    return named(picture, "run")


async def _until(pilot: Pilot[None], holds: Callable[[], bool]) -> None:
    app = pilot.app
    assert isinstance(app, ChatApp)
    async with asyncio.timeout(_LONGEST):
        while not holds():
            if app.failure is not None:
                raise app.failure
            await pilot.pause(0.05)
    await pilot.pause()


def main() -> None:
    model, memory = sys.argv[1:] or (_MODEL, _MEMORY)
    with plain_environment(), tempfile.TemporaryDirectory() as folder:
        picture = asyncio.run(draw(model, parse_bytes(memory), Path(folder)))
    (IMAGES / "run.svg").write_text(picture, "utf-8")


if __name__ == "__main__":
    main()
