"""Bench of the chat in a terminal."""

import sys
from pathlib import Path

import pytest

from bench import chat
from tests.support.bench_runs import RunBench
from tests.support.tiny_models import write_model


def test_keys_are_timed_until_their_echo() -> None:
    with chat.Screen([sys.executable, "-c", chat._ECHO]) as screen:
        screen.wait("word", 60.0, lambda: screen.shows("ready"))
        screen.type(3)
        delays = screen.key_delays_ms()
    assert delays["keys"] == 3 and 0 < delays["median_ms"] <= delays["p95_ms"] <= delays["max_ms"]


def test_an_open_update_is_not_shown_yet() -> None:
    code = r"print('a\x1b[?2026hb\x1b[?2026l\x1b[?2026hc', end='', flush=True); input()"
    with chat.Screen([sys.executable, "-c", code]) as screen:
        screen.wait("b", 60.0, lambda: screen.shows("b"))
        screen.look(0.1)
        assert not screen.shows("c")


def test_nothing_comes_after_the_end() -> None:
    with chat.Screen([sys.executable, "-c", "pass"]) as screen:
        assert not screen.look(60.0) and screen.ended


@pytest.mark.exhaustive
def test_a_toy_run(tmp_path: Path, run_bench: RunBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFSPEC_CACHE", str(tmp_path / "cache"))
    small = ["--memory", "2GB", "--tokens", "8", "--keys", "3", "--questions", "1", "--idle-seconds", "1"]
    ran = run_bench(chat.main, str(write_model(tmp_path / "model")), *small)
    assert ran.summary["keys_generating"]["keys"] >= 3 and len(ran.summary["streaming"]) == 1
