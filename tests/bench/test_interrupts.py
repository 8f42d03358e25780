"""How the bench of Ctrl-C reads what a terminal shows, and what it calls a fault."""

import pytest

from bench.interrupts import COMMANDS, Run, faults, lines_beside, screen_lines


def test_what_moved_and_was_erased_is_not_on_the_screen() -> None:
    bars = b"one\r\nbar 1\r\nbar 2\r\x1b[2K\x1b[1A\x1b[2K\x1b[?25htwo\r\n"
    assert screen_lines(bars) == ["one", "two"]
    assert lines_beside(b"drawn\x1b[?1049l\r\n^C12 tokens in 3.5 s\r\n") == ["# tokens in # s"]


@pytest.mark.parametrize(
    ("run", "found"),
    [
        (Run(b"usual\r\nstopped\r\n", 130 << 8), []),
        (Run(b"usual\r\n", 2), []),
        (Run(b"", 0), []),
        (Run(b"", 1 << 8), ["ended with 1"]),
        (Run(b""), ["ended with a hang"]),
        (Run(b"\x1b[?25l", 2), ["modes left: 25"]),
        (Run(b"\x1b[?1049h\x1b[?25l\x1b[?25h", 2), ["modes left: 1049"]),
        (Run(b"", 2, sane=False), ["the terminal's settings are changed"]),
        (Run(b"", 2, left=["x.partial"]), ["files left: x.partial"]),
        (Run(b"Traceback\r\n", 2), ["said: Traceback"]),
        (Run(b"stopped\r\nExit\r\n", 2), ["said: stopped | Exit"]),
        (Run(b"2 of 3 files are finished and kept: x\r\nstopped\r\n", 2), []),
    ],
)
def test_what_is_a_fault(run: Run, found: list[str]) -> None:
    assert faults(COMMANDS["generate"], run, {"usual"}) == found
