"""Ctrl-C at moments when an exception would do harm, and pressed twice. Each in a process of its own."""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from offspec.ui.interrupt import CODE
from tests.support.waiting import PATIENCE
from tests.ui.cli.program import environment

BEGIN = """
import os, signal, sys, time
from pathlib import Path
from offspec.core.files import removed_on_exit
from offspec.ui import interrupt

def strike():
    os.kill(os.getpid(), signal.SIGINT)

def within(module, code):
    exec(code, {"__name__": module, "strike": strike, "time": time, "print": print})

signal.signal(signal.SIGINT, signal.default_int_handler)
interrupt.listen()
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BEGIN + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=PATIENCE,
    )


@pytest.mark.parametrize("module", ["rich.live", "importlib._bootstrap", "weakref", "textual.app"])
def test_interrupt_waits_for_a_library_call(module: str) -> None:
    done = run(
        f"""
        with interrupt.command():
            try:
                within({module!r}, "strike(); print('drawn')")
                for _ in range(1000):
                    time.sleep(0.01)
            except KeyboardInterrupt:
                print("stopped")
        """
    )
    assert (done.stdout, done.stderr) == ("drawn\nstopped\n", "")


def test_interrupt_during_a_library_call_ends_the_process_and_removes_files(tmp_path: Path) -> None:
    file = tmp_path / "half"
    done = run(
        f"""
        with interrupt.command(), removed_on_exit(Path({str(file)!r})):
            Path({str(file)!r}).write_text("half")
            within("importlib._bootstrap", "strike()\\nwhile True: time.sleep(0.01)")
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (CODE, "", "stopped\n")
    assert not file.exists()


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP])
def test_signal_leaves_no_partial_files(sent: signal.Signals, tmp_path: Path) -> None:
    folder = tmp_path / "half"
    done = run(
        f"""
        with interrupt.command(), removed_on_exit(Path({str(folder)!r})):
            Path({str(folder)!r}).mkdir()
            Path({str(folder)!r}, "weights").write_text("half")
            os.kill(os.getpid(), {int(sent)})
            time.sleep(10)
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (-sent, "", "")
    assert not folder.exists()


# A program, its exit code, and its output.
ENDS: dict[str, tuple[str, int, str, str]] = {
    "a second strike does not disturb what cleans up": (
        """
        interrupt._ONE_HAND_S = 600.0
        with interrupt.command():
            try:
                strike()
                time.sleep(10)
            finally:
                strike()
                print("cleaned up", flush=True)
                os._exit(7)
        """,
        *(7, "cleaned up\n", ""),
    ),
    "one much later ends what does not come to an end": (
        """
        interrupt._ONE_HAND_S = 0.0
        with interrupt.command():
            try:
                strike()
            finally:
                time.sleep(0.01)
                strike()
                print("never")
        """,
        *(CODE, "", "stopped\n"),
    ),
    "what a destructor swallows is raised again": (
        """
        class Late:
            def __del__(self):
                raise KeyboardInterrupt

        with interrupt.command():
            try:
                Late()
                time.sleep(10)
            except KeyboardInterrupt:
                print("stopped")
        """,
        *(0, "stopped\n", ""),
    ),
    "what it leaves half made says nothing": (
        """
        class Held:
            def __init__(self):
                strike()
                time.sleep(10)
                self.file = None

            def __del__(self):
                del self.file

        with interrupt.command():
            try:
                Held()
            except KeyboardInterrupt:
                print("stopped")
        """,
        *(0, "stopped\n", ""),
    ),
    "it can do something else once": (
        """
        with interrupt.command():
            try:
                with interrupt.override_handler(lambda: print("halts")):
                    strike()
                    strike()
            except KeyboardInterrupt:
                print("stopped")
        """,
        *(0, "halts\nstopped\n", ""),
    ),
    "outside of a command it ends the process without a word": ("strike(); print('never')", *(CODE, "", "")),
    "it stays ignored where it was": (
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        interrupt.listen()
        strike()
        print("goes on")
        """,
        *(0, "goes on\n", ""),
    ),
}


@pytest.mark.parametrize("what", ENDS)
def test_exit_codes_and_output(what: str) -> None:
    code, *expected = ENDS[what]
    done = run(code)
    assert [done.returncode, done.stdout, done.stderr] == expected
