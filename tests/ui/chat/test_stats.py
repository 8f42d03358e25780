"""Speed statistics, and the live status line."""

from dataclasses import replace
from pathlib import Path

import pytest

from offspec.chat.archive import SessionArchive
from offspec.core.config import EngineConfig
from offspec.core.errors import StreamError
from offspec.core.events import PassProgress, PassStats, Prefill, TextDelta
from offspec.core.sampling_defaults import SamplingOverrides
from offspec.ui.chat.controller import ChatController
from offspec.ui.chat.report import format_accepted_by_source, report
from offspec.ui.chat.setup import ChatSetup
from offspec.ui.chat.stats import HISTORY, ChatStats, PassTimes, Totals
from offspec_planners.units import format_bytes
from tests.support.fake_engine import Script, ScriptedEngine

PREFILL = Prefill(tokens=214, reused=1020, layer=0, layers=80)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def chat(tmp_path: Path) -> ChatController:
    """A chat whose third answer fails."""
    engine = ScriptedEngine(
        ["The sky is blue, and so on.", "The sky is blue, and so on.", Script("a b c d e f", 1)]
    )
    chat = ChatController(
        engine, ChatSetup(EngineConfig("demo"), SamplingOverrides()), SessionArchive(tmp_path)
    )
    engine.notify = chat.on_event
    return chat


def passed(index: int, emitted: int = 4) -> PassStats:
    return PassStats(index, 412, 9, 9, emitted, 0.8, 25.2, 10**9, wait_seconds=20.0, compute_seconds=5.0)


def test_status_line_follows_an_answer() -> None:
    clock = Clock()
    stats = ChatStats(clock)
    assert stats.live_line() == ""
    stats.on_event(PREFILL)
    clock.now += 0.4
    assert stats.live_line() == "reading the prompt: 214 tokens, 1,020 cached · 0.4 s"
    stats.on_event(PassProgress(1, 412, 0, 80, 0, 0.5))
    assert stats.live_line().endswith("1,020 cached · waiting for layer 1 · 0.5 s")
    stats.on_event(PassProgress(1, 412, 3, 80, 2_850_000_000, 1.5))
    assert (
        stats.live_line() == "reading the prompt: 214 tokens, 1,020 cached · layer 3/80 · 1.90 GB/s · 1.5 s"
    )
    stats.on_event(Prefill(214, 1020, 3, 80))  # sent along with the progress; the answer does not start again
    stats.on_event(TextDelta("Hi", (1,)))
    stats.on_event(passed(1))
    stats.on_event(PassProgress(2, 0, 0, 80, 0, 0.0))
    clock.now += 0.8
    assert stats.live_line() == "drafting · 0.8 s"
    stats.on_event(PassProgress(2, 412, 0, 80, 0, 0.9))
    clock.now += 0.2
    assert stats.live_line() == "tree of 412 · waiting for layer 1 · 1.1 s"
    stats.on_event(PassProgress(2, 412, 37, 80, 1_900_000_000, 1.0))
    assert stats.live_line() == "layer 37/80 · 1.90 GB/s · tree of 412 · 1.0 s of 26.0 s"
    clock.now += 30  # the disk stalls, and the line shows it
    assert stats.live_line().endswith("· 31.0 s")
    stats.end_answer()
    assert stats.live_line() == ""
    stats.on_event(Prefill(tokens=1, reused=0, layer=0, layers=8))
    assert stats.live_line() == "reading the prompt: 1 token · 0.0 s"


def test_totals_and_time_split() -> None:
    stats = ChatStats()
    stats.on_event(PREFILL)
    stats.on_event(passed(1, 3))
    stats.on_event(passed(2, 5))
    assert stats.last_times == PassTimes(0.8, 20.0, 5.0)
    assert stats.answer == Totals(8, 2, 52.0, 2 * 10**9, PassTimes(1.6, 40.0, 10.0))
    assert stats.tokens_per_pass == 4.0
    assert stats.tok_per_s == pytest.approx(8 / 52)
    stats.on_event(PREFILL)
    assert stats.answer == Totals() and stats.tok_per_s == 0.0
    assert stats.session.tokens == 8


def test_history_is_bounded_and_complete() -> None:
    stats = ChatStats()
    before = stats.history
    for index in range(HISTORY + 5):
        stats.on_event(passed(index, index))
    assert before == ()
    assert stats.history == tuple(range(5, HISTORY + 5))


def test_report(chat: ChatController) -> None:
    assert report(chat).startswith("No question has been answered yet.")
    list(chat.ask("Why?"))
    list(chat.ask("And?"))
    text = report(chat)
    assert "| tokens | 7 | 14 |" in text
    assert "| speed | 7.00 tok/s | 7.00 tok/s |" in text
    assert "| time waiting for weights | 0.300 s (30%) | 0.600 s (30%) |" in text
    assert "| streamed at | 1.60 GB/s | 1.60 GB/s |" in text
    assert "read from disk" not in text, "all that streams is"
    streamed = chat.stats.answer.bytes_streamed
    chat.stats.session = replace(chat.stats.session, bytes_read=10**9)
    assert f"| read from disk | {format_bytes(streamed)} | 1.00 GB |" in report(chat)
    assert "were cached" in text and "draft self (4-bit)" in text
    lines = []
    with pytest.raises(StreamError):
        for _ in chat.ask("So?"):
            lines.append(chat.stats.live_line())
    assert lines[0].startswith("reading the prompt") and chat.stats.live_line() == ""


def test_draft_sources_are_reported_if_there_are_several() -> None:
    stats = ChatStats()
    for guessed in ((("self", 3),), (("self", 1), ("some/head", 4)), ()):
        stats.on_event(replace(passed(1), guessed_by=guessed))
    assert stats.session.accepted_by_source == (("self", 4), ("some/head", 4))
    assert format_accepted_by_source(stats.session).endswith("self 4, head 4.")
    assert format_accepted_by_source(Totals(accepted_by_source=(("suffix", 3),))) == ""
