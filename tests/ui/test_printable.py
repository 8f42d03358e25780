"""Foreign text on its way to a terminal: errors, notices, progress, warnings, and drawings."""

import io
import re
import subprocess
import sys

import pytest
from rich.table import Table

from offspec.core.errors import CheckpointError
from offspec.core.events import LoadProgress, Notice
from offspec.ui.cli.console import Console
from offspec.ui.cli.output import LiveLine
from offspec.ui.messages import user_message
from offspec.ui.printable import printable, without_controls
from tests.support.waiting import PATIENCE
from tests.ui.cli.program import environment

# Erases the screen, sets a title, the same with C1, rings, changes the text direction, deletes.
HOSTILE = "a\x1b[2J\x1b]0;title\a\x9b2J\x9d0;t\x9c\x07\u202eb\u2066c\x7f\x08\rd"
ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def test_control_characters_become_visible() -> None:
    assert not ACTING.search(printable(HOSTILE))
    assert len(printable(HOSTILE)) == len(HOSTILE)
    assert printable("tab\tand\nline, Grüße, שלום") == "tab\tand\nline, Grüße, שלום"
    assert without_controls(HOSTILE) == ACTING.sub("", HOSTILE)


@pytest.mark.parametrize("about", [CheckpointError(HOSTILE), Notice(HOSTILE)])
def test_errors_and_notices(about: CheckpointError | Notice) -> None:
    assert user_message(about) == printable(HOSTILE)


def drawn(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_console_output() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    table = Table(HOSTILE)
    table.add_row(HOSTILE)
    console.print(HOSTILE, table)
    assert not ACTING.search(drawn(console).replace("\r", ""))


def test_bars_and_status_lines() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=300, color_system=None)
    live = LiveLine(console, wanted=True)
    live.progress(LoadProgress(HOSTILE, 1, 2, "files", detail=HOSTILE))
    live.stop()
    live.status(HOSTILE)
    live.status("[b]" + HOSTILE)
    live.stop()
    text = drawn(console)
    assert "[2J\ufffd]0;title" in text
    own = re.sub(r"\x1b\[(\?25[hl]|\d*[AK]|\?2026[hl])|\r", "", text)
    assert not ACTING.search(own)


def test_bars_show_the_remaining_time() -> None:
    now = 0.0
    console = Console(
        file=io.StringIO(), force_terminal=True, width=300, color_system=None, get_time=lambda: now
    )
    live = LiveLine(console, wanted=True)
    for now, done in ((0.0, 0), (10.0, 16), (20.0, 32)):  # noqa: B007 - it is the console's clock
        live.progress(LoadProgress("training", done, 1000, "steps", detail="loss 3"))
    live.stop()
    assert "32 of 1000 steps, 10 min left, loss 3" in drawn(console)


def test_output_of_libraries() -> None:
    code = f"""
import logging, threading, warnings
from offspec.ui.printable import sanitize_library_output
sanitize_library_output()
hostile = {HOSTILE!r}
warnings.warn(hostile)
logging.getLogger("library").warning("about %s", hostile)
thread = threading.Thread(target=lambda: [][hostile])
thread.start()
thread.join()
raise RuntimeError(hostile)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=environment(), timeout=PATIENCE
    )
    said = done.stderr.decode()
    assert done.returncode == 1
    assert said.count(printable(HOSTILE)) == 3 and "TypeError" in said
    assert not ACTING.search(said)
