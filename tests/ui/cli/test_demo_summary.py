"""The summary of `offspec demo`: speedup, the bottleneck of each run, and reasons for slow speculation."""

import os
from collections.abc import Iterator

import pytest

from offspec.core.config import EngineConfig
from offspec.core.events import PassStats, Result
from offspec.ui.cli import demo_summary
from offspec.ui.cli.demo_summary import CpuLoad, summary, wrapped
from offspec.ui.cli.demo_view import Run
from offspec.ui.cli.output import StdoutWriter

WIDE = EngineConfig("demo-wide", memory=1_500_000_000)
OWN = EngineConfig("./model", memory=4_000_000_000)


def run(
    passes: int, each: int, seconds: float, *, draft: float = 0.0, wait: float = 0.0, **given: int
) -> Run:
    """A run of equal passes of `each` tokens. draft, wait: seconds per pass; paused: undrafted passes."""
    steps, moved = 3 if draft else 0, given.get("moved", 1_000_000_000)
    found = Run("with speculation" if draft else "one token per pass")
    found.passes = [
        PassStats(
            i + 1,
            32,
            8,
            steps,
            each,
            draft,
            seconds - draft,
            moved,
            wait_seconds=wait,
            bytes_read=moved,
            paused=i < given.get("paused", 0),
        )
        for i in range(passes)
    ]
    found.result = Result(
        text="",
        token_ids=tuple(range(passes * each)),
        passes=passes,
        seconds=passes * seconds,
        ttft_s=seconds,
        bytes_streamed=passes * moved,
        bytes_read=passes * moved,
        peak_memory_bytes=0,
        finish_reason="eos" if draft else "halted",
        draft="demo" if draft else "none",
        budget=32,
        seed=0,
    )
    return found


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> Iterator[CpuLoad]:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 0.1, 0.1))
    monkeypatch.setattr(demo_summary, "_runqueue_wait_s", lambda: 0.0)
    yield CpuLoad.measure()


def test_speedup_and_bottleneck_of_each_run(idle: CpuLoad) -> None:
    alone = run(10, 1, 1.0, wait=0.7)
    lines = summary(alone, run(8, 10, 2.0, draft=0.5, wait=0.1), WIDE, idle)
    assert lines[1] == (
        "one token per pass    1.00 tok/s: 10 tokens in 10 passes; bound by the disk (70% of the time)"
    )
    assert lines[2].endswith(
        "80 tokens in 8 passes, 10.0 tokens per pass; bound by compute (70% of the time)"
    )
    assert lines[4] == (
        "5.0 times the speed, the same 10 tokens. Memory limit 1.50 GB, 1.00 GB from disk in each pass."
    )
    assert lines[5].startswith("Without speculation, only 10 tokens were generated")
    assert lines[6].startswith("The cost is real") and len(lines) == 7
    assert "bound by drafting (75% of the time)" in summary(alone, run(8, 4, 2.0, draft=1.5), OWN, idle)[2]


def test_busy_processors_are_reported(idle: CpuLoad, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, drafted = run(10, 1, 1.0), run(10, 1, 2.0, draft=0.5)
    busy = summary(alone, drafted, OWN, CpuLoad(99.5, 0.0))
    assert "0.5 times the speed" in busy[4]
    assert busy[-1].startswith("Other processes are busy (load average 99.5 on ")
    monkeypatch.setattr(demo_summary, "_runqueue_wait_s", lambda: 15.0)  # of 30 s, as others started later
    assert summary(alone, drafted, OWN, idle)[-1].startswith("Other processes are busy")


def test_slowdown_always_has_a_reason(idle: CpuLoad) -> None:
    alone, drafted = run(10, 1, 1.0), run(10, 1, 2.0, draft=0.5)
    assert summary(alone, drafted, OWN, idle)[-1] == "For this prompt, drafting cost more time than it saved."
    alone, drafted = run(10, 1, 1.0, moved=0), run(10, 1, 2.0, draft=0.5, moved=0)
    assert summary(alone, drafted, OWN, idle)[-1].startswith("No weights are streamed")
    assert "all weights in memory" in summary(alone, drafted, OWN, idle)[4]


def test_paused_drafting_is_reported(idle: CpuLoad) -> None:
    paused = run(10, 1, 1.0, draft=0.1, paused=9)
    said = [line for line in summary(run(10, 1, 1.0), paused, OWN, idle) if "paused" in line]
    assert said == [
        "Drafting was paused in 9 of 10 passes, either because it was slower or to measure whether it is."
    ]


def test_lines_break_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    line = f"{'word ' * 15}`offspec plan Qwen/Qwen3-14B`"
    assert wrapped(line, StdoutWriter()) == line
    terminal = StdoutWriter()
    terminal.is_terminal = True
    assert max(map(len, wrapped(line, terminal).splitlines())) <= 60
    assert " ".join(wrapped(line, terminal).split()) == line


def test_different_answers_are_not_called_equal(idle: CpuLoad) -> None:
    other = run(2, 10, 1.0, draft=0.1)
    assert other.result is not None
    object.__setattr__(other.result, "token_ids", tuple(range(100, 120)))
    assert "different text (this is a bug: please report it)" in summary(run(10, 1, 1.0), other, OWN, idle)[4]
