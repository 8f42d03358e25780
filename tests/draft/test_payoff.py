"""Drafters are paused while passes without them are measured to be faster."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from offspec.draft.mix.mixture import GrowthStats, Mixture, Source
from offspec.draft.mix.payoff import OneRowSeconds, Payoff
from tests.support.table_drafter import ChainLookup, TableDrafter, greedy_scorer, random_table

ALONE = 0.1  # seconds of a one-row pass


def _run(
    passes: int, drafted: Callable[[int], float], known: OneRowSeconds | None = None, tokens: int = 4
) -> list[bool]:
    """Return which of `passes` passes have drafters, given seconds by pass number.
    known: bounds on a one-row pass, by default a correct prediction.
    """
    payoff, seen, known = Payoff(), list[bool](), known or OneRowSeconds.predicted(ALONE)
    for index in range(passes):
        seen.append(not payoff.paused_passes)
        gave, seconds = (tokens, drafted(index)) if seen[-1] else (1, ALONE)
        payoff.observe(seen[-1], gave, seconds, known)
    return seen


def _stretches(seen: list[bool]) -> list[int]:
    """Return the lengths of runs, alternately with and without drafters."""
    cuts = [0, *(i for i in range(1, len(seen)) if seen[i] != seen[i - 1]), len(seen)]
    return [end - start for start, end in pairwise(cuts)]


def test_fast_drafters_are_sampled_occasionally() -> None:
    assert _stretches(_run(200, lambda index: 0.3)) == [3, 1, 4, 1, 65, 2, 65, 2, 57]


def test_no_sample_if_one_row_cannot_be_faster() -> None:
    assert all(_run(200, lambda index: 0.3, OneRowSeconds.predicted(5.0)))
    assert all(_run(200, lambda index: 1.0, OneRowSeconds(0.3, 1.0))), (
        "without a plan: weights alone take longer"
    )


@pytest.mark.parametrize(("tokens", "passes"), [(2, 13), (4, 21), (16, 27)])
def test_sample_delay_grows_with_its_possible_cost(tokens: int, passes: int) -> None:
    seen = _run(200, lambda index: 1.0, OneRowSeconds(0.0, 0.9), tokens)
    loss = 0.9 - 1.0 / tokens  # seconds, at the slowest possible speed
    assert seen.index(False) == passes >= 32 * loss


def test_slow_drafters_are_paused_without_a_plan() -> None:
    # All but 0.02 of the second is drafting: a single token takes no longer than that.
    assert _stretches(_run(40, lambda index: 1.0, OneRowSeconds(0.0, 0.02)))[:2] == [2, 34], "immediately"
    seen = _run(400, lambda index: 0.5, OneRowSeconds(0.0, 0.5))
    assert sum(seen[60:]) < 20 and any(seen[60:]), "except for occasional samples"


def test_fast_drafters_lose_few_passes_without_a_plan() -> None:
    for passes in range(1, 500, 23):
        seen = _run(passes, lambda index: 0.2, OneRowSeconds(0.0, 0.2))
        seconds = sum(0.2 if drafted else ALONE for drafted in seen)
        tokens = sum(4 if drafted else 1 for drafted in seen)
        assert tokens / seconds > 0.97 * 4 / 0.2


def test_pauses_of_slow_drafters_grow() -> None:
    # Two passes with drafters, two without for comparison; then two each time, the first to catch up.
    assert _stretches(_run(800, lambda index: 1.0)) == [2, 34, 2, 128, 2, 512, 2, 118]


def test_small_loss_needs_more_passes() -> None:
    first, sample, more, rest, *_ = _stretches(_run(100, lambda index: 0.5))
    assert (first, sample, rest) == (2, 2, 32) and more > 2
    assert sum(_run(300, lambda index: 0.41)) > 280, "no worse than the margin"


def test_recovered_drafters_resume_with_short_pauses() -> None:
    seen = _run(600, lambda index: 1.0 if index < 50 or index > 300 else 0.3)
    assert sum(seen[200:300]) >= 96, "all except samples"
    assert 32 <= max(_stretches(seen[300:])[1:3]) <= 34, "though the last pause was longer"


def _mixture(lookups: list[ChainLookup]) -> Mixture:
    return Mixture([Source("table", TableDrafter(random_table(4, 1.0)), greedy_scorer())], lookups)


@pytest.mark.parametrize("lookups", [0, 1])
def test_lookups_continue_while_drafters_are_paused(lookups: int) -> None:
    mixture = _mixture([ChainLookup([3, 1], 0.9)] * lookups)
    everyone = tuple(range(1 + lookups))
    assert mixture.active() == everyone
    mixture.stats.payoff.paused_passes = 2
    assert mixture.active() == everyone[1:]
    growth = GrowthStats(everyone[1:])
    one_row = OneRowSeconds.predicted(1.0)
    mixture.observe_drafting(growth, 1, 1.0, one_row)
    assert mixture.stats.payoff.paused_passes == 2, (
        "the first pass, which includes the prompt, is not counted"
    )
    mixture.stats.payoff.paused_passes = 2
    mixture._passes = 1
    mixture.observe_drafting(growth, 1, 1.0, None)
    assert mixture.stats.payoff.paused_passes == 1 and not mixture.stats.payoff.alone.passes
    mixture.observe_drafting(growth, 1, 1.0, one_row)
    assert mixture.active() == everyone and mixture.stats.payoff.alone.each == 1.0


@pytest.mark.parametrize("drafters", [0, 1])
def test_lookups_are_paused_if_one_row_is_faster(drafters: int) -> None:
    """Without costs that bound it. Passes without lookup results occur anyway, and serve for comparison."""
    mixture = _mixture([ChainLookup([3, 1], 0.9)])
    if not drafters:
        mixture = Mixture([], mixture.lookups)
    mixture.stats.payoff.paused_passes = 1000 * drafters
    mixture._passes, rows = 1, list[int]()
    for index in range(60):
        growth = GrowthStats(mixture.active())
        rows.append(8 if growth.active and index % 2 else 1)  # every second time there is a match
        seconds = float(rows[-1])
        mixture.observe_lookups(growth, rows[-1], min(rows[-1], 2), seconds, OneRowSeconds(0.0, seconds))
    assert rows[:4] == [1, 8, 1, 8] and set(rows[4:36]) == {1} and rows[36:40].count(8) == 1
