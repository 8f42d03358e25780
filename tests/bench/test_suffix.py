"""The bench of lookups: its text, its arithmetic, and a run."""

from __future__ import annotations

from itertools import count

import pytest

from bench import suffix
from offspec.draft.growing_tree import Subtree
from offspec.draft.lookup.ngram import NgramLookup
from tests.support.bench_runs import RunBench


def test_most_of_the_text_is_copied() -> None:
    text = suffix.make_text(6000)
    assert text == suffix.make_text(6000) and len(text) == 6000
    seen: set[tuple[int, ...]] = set()
    repeated = 0
    for place in range(4, len(text)):
        gram = tuple(text[place - 4 : place])
        repeated += gram in seen
        seen.add(gram)
    assert 0.6 < repeated / len(text) < 0.9


def test_what_is_accepted_is_the_path_that_the_subtree_holds() -> None:
    subtree = Subtree([-1, -1, 1, 2], [5, 6, 7, 8], [-1.0, -1.0, -0.1, -0.1])
    texts: list[list[int]] = [[6, 7, 8, 9], [6, 7], [6, 8], [7], []]
    assert [suffix.accepted(subtree, tokens) for tokens in texts] == [3, 2, 1, 0, 0]


def test_a_replay_goes_through_the_whole_text_and_times_each_part() -> None:
    text = [*range(40), *range(40), 3, 4, 5]
    ticks = count()
    costs = suffix.replay(NgramLookup(), text, 42, None, 64, lambda: float(next(ticks)))
    assert sum(cost.tokens for cost in costs) == len(text) - 42
    assert {(cost.start, cost.below, cost.learn) for cost in costs} == {(1.0, 1.0, 1.0)}
    assert max(cost.tokens for cost in costs) > 1


def test_the_tally() -> None:
    costs = [suffix.PassCost(1.0, 4.0, 1.0, 3, 10), suffix.PassCost(1.0, 6.0, 3.0, 5, 20)]
    row = suffix.tally(costs, 0.1)
    assert row["passes"] == 2 and row["tokens_per_pass"] == 4.0 and row["nodes"] == 15.0
    assert row["seconds"] == 8.0 and row["below_seconds"] == 5.0 and row["p99_seconds"] == 10.0
    assert row["floor_seconds"] == pytest.approx(2.3) and row["of_floor"] == pytest.approx(2.3 / 8)


def test_only_the_suffix_source_at_the_length_in_question_may_be_too_slow() -> None:
    rows = [
        {"source": source, "history": history, "seconds": seconds}
        for source in ("suffix", "lookup")
        for history in (1000, 32768, 131072)
        for seconds in (0.5e-3, 2e-3)
    ]
    slow = suffix.too_slow(rows)
    assert [(row["source"], row["history"], row["seconds"]) for row in slow] == [
        ("suffix", 1000, 2e-3),
        ("suffix", 32768, 2e-3),
    ]


def test_a_run(run_bench: RunBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "WANTED_SECONDS", 100.0)
    ran = run_bench(suffix.main, "--history", "600", "--tokens", "150")
    assert ran.code == 0 and ran.record | ran.summary == ran.record and ran.summary["too_slow"] == 0
    assert len(ran.summary["rows"]) == 4
    for row in ran.summary["rows"]:
        parts = sum(row[f"{part}_seconds"] for part in ("start", "below", "learn"))
        assert row["seconds"] == pytest.approx(parts)
