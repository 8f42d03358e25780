"""Draw the pictures of `offspec chat`: the real app over an engine that follows a script.

python docs/screenshots.py            write docs/images/*.svg
python docs/screenshots.py --check    exit 1 when they are not what the program shows today
"""

import asyncio
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

IMAGES = Path(__file__).with_name("images")
ROOT = Path(__file__).parents[1]

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from docs import pictured  # noqa: E402
from offspec.ui.tui.panel import SidePanel  # noqa: E402
from tests.support.sample_plans import large  # noqa: E402
from tests.ui.tui import stage  # noqa: E402

_SIZE = (116, 37)
_TREE_SIZE = (84, 51)
# Variables that would change a picture.
_UNSET = ("NO_COLOR", "OFFSPEC_THEME", "COLORFGBG")


async def draw(folder: Path) -> dict[str, str]:
    """The pictures by name. folder: where the conversation is kept meanwhile."""
    plan = large()
    app, _ = stage.app_for(pictured.ANSWERS, folder, plan=plan, model=plan.target, draft=plan.draft)
    pictures = {}

    def take(name: str) -> None:
        pictures[name] = named(app.export_screenshot(title="offspec chat"), name)

    async with app.run_test(size=_SIZE) as pilot:
        await stage.ask(pilot, *pictured.QUESTIONS)
        controller = app.controller
        assert controller is not None
        for done in pictured.passes():
            controller.stats.on_event(done)
        controller.trees.append(pictured.tree(len(controller.trees) + 1))
        app.query_one(SidePanel).update_from(controller)
        await stage.settled(pilot)
        take("chat")
        await pilot.press("ctrl+t")
        await pilot.resize_terminal(*_TREE_SIZE)
        await stage.settled(pilot)
        take("tree")
        await pilot.press("escape", "ctrl+o")
        await pilot.resize_terminal(*_SIZE)
        app.theme = "offspec-light"
        await stage.settled(pilot)
        take("sources")
    return pictures


def named(picture: str, name: str) -> str:
    """The picture with a prefix of our own for the names inside, which rich makes from a checksum.

    It takes the fonts that are installed: rich has others loaded from a server.
    """
    local = re.sub(r"\s*@font-face \{.*?\}", "", picture, flags=re.DOTALL)
    return re.sub(r"\bterminal-\d+-", f"{name}-", local)


@contextmanager
def plain_environment() -> Iterator[None]:
    """Unset the variables that a user may have set for the terminal."""
    kept = {name: os.environ.pop(name) for name in _UNSET if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def pictures() -> dict[str, str]:
    """The pictures by name, as the program draws them today."""
    with plain_environment(), tempfile.TemporaryDirectory() as folder:
        return asyncio.run(draw(Path(folder)))


def main() -> int:
    drawn = {IMAGES / f"{name}.svg": picture for name, picture in pictures().items()}
    if "--check" not in sys.argv[1:]:
        IMAGES.mkdir(exist_ok=True)
        for file, picture in drawn.items():
            file.write_text(picture, encoding="utf-8")
        return 0
    stale = [
        file.name
        for file, picture in drawn.items()
        if not file.exists() or file.read_text(encoding="utf-8") != picture
    ]
    if stale:
        print(
            f"docs/images: {', '.join(stale)} not as `offspec chat` looks; run `make docs`", file=sys.stderr
        )
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
