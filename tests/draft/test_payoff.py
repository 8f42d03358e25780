"""Drafters are paused while passes without them are measured to be faster."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from offspec.draft.mix.mixture import GrowthStats, Mixture, Source
from offspec.draft.mix.payoff import OneRowSeconds, Payoff
from tests.support.table_drafter import ChainLookup, TableDrafter, greedy_scorer, random_table

ALONE = 0.1  # seconds of a pass of one row


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


def test_drafters_that_pay_make_room_for_a_sample_now_and_then() -> None:
    assert _stretches(_run(200, lambda index: 0.3)) == [3, 1, 4, 1, 65, 2, 65, 2, 57]


def test_nothing_is_tried_where_one_row_cannot_be_as_fast() -> None:
    assert all(_run(200, lambda index: 0.3, OneRowSeconds.predicted(5.0)))
    assert all(_run(200, lambda index: 1.0, OneRowSeconds(0.3, 1.0))), (
        "without a plan: weights alone take longer"
    )


@pytest.mark.parametrize(("tokens", "passes"), [(2, 13), (4, 21), (16, 27)])
def test_without_a_plan_a_sample_waits_the_longer_the_more_it_may_lose(tokens: int, passes: int) -> None:
    seen = _run(200, lambda index: 1.0, OneRowSeconds(0.0, 0.9), tokens)
    loss = 0.9 - 1.0 / tokens  # seconds, were it as slow as it may be
    assert seen.index(False) == passes >= 32 * loss


def test_without_a_plan_slow_drafts_come_to_rest() -> None:
    # All but 0.02 of the second is drafting: one token alone takes no longer than that.
    assert _stretches(_run(40, lambda index: 1.0, OneRowSeconds(0.0, 0.02)))[:2] == [2, 34], (
        "at once, for sure"
    )
    seen = _run(400, lambda index: 0.5, OneRowSeconds(0.0, 0.5))
    assert sum(seen[60:]) < 20 and any(seen[60:]), "but for a look now and then"


def test_without_a_plan_drafts_that_pay_lose_few_passes() -> None:
    for passes in range(1, 500, 23):
        seen = _run(passes, lambda index: 0.2, OneRowSeconds(0.0, 0.2))
        seconds = sum(0.2 if drafted else ALONE for drafted in seen)
        tokens = sum(4 if drafted else 1 for drafted in seen)
        assert tokens / seconds > 0.97 * 4 / 0.2


def test_drafters_that_lose_rest_longer_each_time() -> None:
    # Two passes to see, two without to compare with; then all they get is two, the first to catch up in.
    assert _stretches(_run(800, lambda index: 1.0)) == [2, 34, 2, 128, 2, 512, 2, 118]


def test_a_small_loss_is_given_more_passes() -> None:
    first, sample, more, rest, *_ = _stretches(_run(100, lambda index: 0.5))
    assert (first, sample, rest) == (2, 2, 32) and more > 2
    assert sum(_run(300, lambda index: 0.41)) > 280, "no worse than the margin"


def test_drafters_that_pay_again_resume_with_short_pauses_later() -> None:
    seen = _run(600, lambda index: 1.0 if index < 50 or index > 300 else 0.3)
    assert sum(seen[200:300]) >= 96, "all but samples"
    assert 32 <= max(_stretches(seen[300:])[1:3]) <= 34, "though the last rest was longer"


def _mixture(lookups: list[ChainLookup]) -> Mixture:
    return Mixture([Source("table", TableDrafter(random_table(4, 1.0)), greedy_scorer())], lookups)


@pytest.mark.parametrize("lookups", [0, 1])
def test_lookups_continue_while_drafters_are_paused(lookups: int) -> None:
    mixture = _mixture([ChainLookup([3, 1], 0.9)] * lookups)
    everyone = tuple(range(1 + lookups))
    assert mixture.active() == everyone
    mixture.stats.payoff.paused_passes = 2
    assert mixture.active() == everyone[1:]
    asked = GrowthStats(everyone[1:])
    one_row = OneRowSeconds.predicted(1.0)
    mixture.observe_drafting(asked, 1, 1.0, one_row)
    assert mixture.stats.payoff.paused_passes == 2, "a first pass, with the prompt in it, says nothing"
    mixture.stats.payoff.paused_passes = 2
    mixture._passes = 1
    mixture.observe_drafting(asked, 1, 1.0, None)
    assert mixture.stats.payoff.paused_passes == 1 and not mixture.stats.payoff.alone.passes
    mixture.observe_drafting(asked, 1, 1.0, one_row)
    assert mixture.active() == everyone and mixture.stats.payoff.alone.each == 1.0


@pytest.mark.parametrize("drafters", [0, 1])
def test_lookups_are_paused_if_one_row_is_faster(drafters: int) -> None:
    """Without costs that bound it. Passes without lookup results occur naturally, and serve for
    comparison.
    """
    mixture = _mixture([ChainLookup([3, 1], 0.9)])
    if not drafters:
        mixture = Mixture([], mixture.lookups)
    mixture.stats.payoff.paused_passes = 1000 * drafters
    mixture._passes, rows = 1, list[int]()
    for index in range(60):
        asked = GrowthStats(mixture.active())
        rows.append(8 if asked.active and index % 2 else 1)  # every other time there is something to be found
        seconds = float(rows[-1])
        mixture.observe_lookups(asked, rows[-1], min(rows[-1], 2), seconds, OneRowSeconds(0.0, seconds))
    assert rows[:4] == [1, 8, 1, 8] and set(rows[4:36]) == {1} and rows[36:40].count(8) == 1
