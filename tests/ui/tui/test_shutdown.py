"""End of a chat: on request, during an answer, without a model, without a terminal."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from textual.pilot import Pilot

from offspec.chat.archive import SessionArchive
from offspec.chat.conversation import Conversation
from offspec.core.errors import CapacityError, OffspecError
from offspec.ui import tui
from offspec.ui.tui import leave
from offspec.ui.tui.app import ChatApp
from tests.support.exhaustive import sampled_params
from tests.support.fake_engine import ScriptedLoad
from tests.support.waiting import PATIENCE
from tests.ui.tui.stage import PlannedEngine, app_for, hold, loaded, play, plays, seen, send, until

LONG = " ".join(f"word{i}" for i in range(40))
FAIL = CapacityError("needs 3.00 GB of memory; give --memory 3GB", needed=3, given=1)


def kept(folder: Path) -> Conversation:
    """Return the only conversation in an archive."""
    (entry,) = SessionArchive(folder).list()
    return Conversation.read(entry.file)


def test_quit_during_an_answer_keeps_the_partial_answer(tmp_path: Path) -> None:
    app, engine = app_for([LONG], tmp_path, passes=2)

    async def scene(pilot: Pilot[None]) -> None:
        await hold(pilot, engine, "Count.")
        await pilot.press("ctrl+q")
        await until(pilot, lambda: app._exit)

    play(app, scene)
    assert leave(app) == 0
    assert engine.closed
    question, answer = kept(tmp_path).messages
    assert question.content == "Count."
    assert answer.content == " ".join(LONG.split()[:8])
    assert answer.finish == "halted"


@plays(LONG)
async def test_quit_shows_what_it_waits_for_and_a_second_quit_does_not_wait(
    pilot: Pilot[None], app: ChatApp, engine: PlannedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = []

    monkeypatch.setattr("offspec.ui.tui.app._STOPPING", PATIENCE)
    app_engine = (await loaded(pilot)).engine
    assert app_engine is not None
    monkeypatch.setattr(app_engine, "stop", lambda: stop.append(1))  # an endless pass
    engine.gate.clear()
    await hold(pilot, engine, "Count.")
    await pilot.press("ctrl+q")
    await until(pilot, lambda: "stopping, then exiting" in seen(app))
    assert stop
    await pilot.press("ctrl+q")
    await until(pilot, lambda: app._exit)
    engine.gate.set()


@plays(LONG, passes=1)
async def test_ctrl_c_stops_the_answer_and_twice_quits(
    pilot: Pilot[None], app: ChatApp, engine: PlannedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await hold(pilot, engine, "Count.")
    await pilot.press("ctrl+c")
    await until(pilot, lambda: app.answer is None)
    assert not app._exit
    monkeypatch.setattr("offspec.ui.tui.app._TWICE", PATIENCE)  # a slow machine is slow to press
    await pilot.press("ctrl+c")
    await pilot.pause()
    assert "Press Ctrl+C again to exit" in seen(app)
    assert not app._exit
    await pilot.press("ctrl+c")
    await until(pilot, lambda: app._exit)


@plays("ok")
async def test_quit_command(pilot: Pilot[None], app: ChatApp) -> None:
    await loaded(pilot)
    await send(pilot, "/quit")
    await until(pilot, lambda: app._exit)


def test_failed_load_ends_the_chat_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app, engine = app_for(["ok"], tmp_path)
    opener = ScriptedLoad(engine, fail=FAIL)
    opener.gate.clear()
    shown = []

    def run(self: ChatApp) -> None:
        async def scene(pilot: Pilot[None]) -> None:
            await send(pilot, "already asked")
            shown.append(seen(self))
            opener.gate.set()
            await until(pilot, lambda: self._exit)

        play(self, scene)

    monkeypatch.setattr(ChatApp, "run", run)
    with pytest.raises(OffspecError, match=re.escape("give --memory 3GB")):
        tui.run(app.setup, opener, SessionArchive(tmp_path))
    assert "loading" in shown[0]
    assert capsys.readouterr().err == "not sent: already asked\n"


class PanicException(BaseException):
    """As raised by a library in Rust: not an Exception."""


def test_any_error_of_the_thread_ends_the_chat(tmp_path: Path) -> None:
    app, engine = app_for(["ok"], tmp_path)
    app.opener = ScriptedLoad(engine, fail=PanicException("index out of range"))

    async def scene(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: app._exit)

    play(app, scene)
    assert isinstance(app.failure, PanicException)


CHILD = """
import sys
from pathlib import Path
from offspec.ui import tui
from offspec.chat.archive import SessionArchive
from offspec.ui.chat.setup import ChatSetup
from offspec.core.config import EngineConfig
from offspec.core.sampling_defaults import SamplingOverrides
from tests.support.fake_engine import ScriptedEngine, ScriptedLoad
engine = ScriptedEngine([" ".join(f"word{i}" for i in range(4000))], delay=0.05)
setup = ChatSetup(EngineConfig(model="demo"), SamplingOverrides({"max_tokens": 2048}))
sys.exit(tui.run(setup, ScriptedLoad(engine), SessionArchive(Path(sys.argv[1]))))
"""


ENDS = {
    "closed": signal.SIGHUP,
    "hung up": signal.SIGHUP,
    "terminated": signal.SIGTERM,
    "struck": signal.SIGINT,
}


@pytest.mark.parametrize("how", sampled_params(ENDS, "hung up"))
def test_closed_terminal_loses_nothing(how: str, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(ours)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm-256color"},
        preexec_fn=_take_terminal,
    )
    os.close(theirs)
    try:
        _read_until(ours, b"Enter sends")
        os.write(ours, b"Count.\r")
        _read_until(ours, b"word7")
        if how == "closed":
            os.close(ours)
        else:
            child.send_signal(ENDS[how])
            last = _drain(ours, child)
            assert last.count(b"\x1b[?1049l") == last.count(b"\x1b[?2004l") == 1
            assert last.rindex(b"\x1b[?25h") > last.rfind(b"\x1b[?25l")
            assert termios.tcgetattr(ours)[:4] == before[:4]
            os.close(ours)
        assert child.wait(PATIENCE) == 128 + ENDS[how]
    finally:
        child.kill()
        child.wait()
    question, answer = kept(tmp_path).messages
    assert question.content == "Count."
    assert answer.content.startswith("word0 word1 word2 word3 word4 word5 word6 word7")
    assert answer.finish == "halted"


def _take_terminal() -> None:
    """Make standard input the controlling terminal of this process, so that it receives a hangup."""
    import fcntl

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _read_until(terminal: int, wanted: bytes) -> None:
    read, limit = b"", time.monotonic() + 4 * PATIENCE
    while wanted not in read:
        assert time.monotonic() < limit, read[-2000:]
        if select.select([terminal], [], [], 0.1)[0]:
            read += os.read(terminal, 65536)


def _drain(terminal: int, child: "subprocess.Popen[bytes]") -> bytes:
    """Read the remaining output until the program has ended, as a terminal does."""
    output, ended = b"", False
    while not ended:
        ended = child.poll() is not None  # and then once more
        while select.select([terminal], [], [], 0 if ended else 0.1)[0]:
            try:
                output += os.read(terminal, 65536)
            except OSError:
                return output
    return output
