"""Ctrl-C at moments that cannot bear an exception, and twice. Each in a process of its own."""

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
from offspec.core.files import unfinished
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
def test_it_waits_until_a_library_is_done(module: str) -> None:
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


def test_where_a_library_goes_on_the_process_ends_and_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "half"
    done = run(
        f"""
        with interrupt.command(), unfinished(Path({str(file)!r})):
            Path({str(file)!r}).write_text("half")
            within("importlib._bootstrap", "strike()\\nwhile True: time.sleep(0.01)")
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (CODE, "", "stopped\n")
    assert not file.exists()


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_the_process_leaves_nothing_unfinished(
    sent: signal.Signals, tmp_path: Path
) -> None:
    folder = tmp_path / "half"
    done = run(
        f"""
        with interrupt.command(), unfinished(Path({str(folder)!r})):
            Path({str(folder)!r}).mkdir()
            Path({str(folder)!r}, "weights").write_text("half")
            os.kill(os.getpid(), {int(sent)})
            time.sleep(10)
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (-sent, "", "")
    assert not folder.exists()


def test_a_second_strike_does_not_disturb_what_cleans_up() -> None:
    done = run(
        """
        with interrupt.command():
            try:
                strike()
                time.sleep(10)
            finally:
                strike()
                print("cleaned up", flush=True)
                os._exit(7)
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, "cleaned up\n", "")


def test_one_much_later_ends_what_does_not_come_to_an_end() -> None:
    done = run(
        """
        interrupt._ONE_HAND_S = 0.0
        with interrupt.command():
            try:
                strike()
            finally:
                time.sleep(0.01)
                strike()
                print("never")
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (CODE, "", "stopped\n")


def test_what_a_destructor_swallows_is_raised_again() -> None:
    done = run(
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
        """
    )
    assert (done.stdout, done.stderr) == ("stopped\n", "")


def test_what_it_leaves_half_made_says_nothing() -> None:
    done = run(
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
        """
    )
    assert (done.stdout, done.stderr) == ("stopped\n", "")


def test_it_can_do_something_else_once() -> None:
    done = run(
        """
        with interrupt.command():
            try:
                with interrupt.instead(lambda: print("halts")):
                    strike()
                    strike()
            except KeyboardInterrupt:
                print("stopped")
        """
    )
    assert (done.stdout, done.stderr) == ("halts\nstopped\n", "")


def test_outside_of_a_command_it_ends_the_process_without_a_word() -> None:
    done = run("strike(); print('never')")
    assert (done.returncode, done.stdout, done.stderr) == (CODE, "", "")


def test_it_stays_ignored_where_it_was() -> None:
    done = run(
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        interrupt.listen()
        strike()
        print("goes on")
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "goes on\n", "")
