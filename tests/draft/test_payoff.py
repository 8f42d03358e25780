"""Drafters rest for as long as passes without any are faster, as this run itself has seen."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from offspec.draft.mix.mixture import Asked, Mixture, Source
from offspec.draft.mix.payoff import OneRow, Payoff
from tests.support.table_drafter import ChainLookup, TableDrafter, greedy_scorer, random_table

ALONE = 0.1  # seconds of a pass of one row


def _run(
    passes: int, drafted: Callable[[int], float], known: OneRow | None = None, tokens: int = 4
) -> list[bool]:
    """Which of so many passes have drafters, where those take so long, by their number.

    known: of a pass of one row, by default a prediction that is right.
    """
    payoff, seen, known = Payoff(), list[bool](), known or OneRow.predicted(ALONE)
    for index in range(passes):
        seen.append(not payoff.rest)
        gave, seconds = (tokens, drafted(index)) if seen[-1] else (1, ALONE)
        payoff.observe(seen[-1], gave, seconds, known)
    return seen


def _stretches(seen: list[bool]) -> list[int]:
    """Lengths of stretches, with drafters, without, and so on."""
    cuts = [0, *(i for i in range(1, len(seen)) if seen[i] != seen[i - 1]), len(seen)]
    return [end - start for start, end in pairwise(cuts)]


def test_drafters_that_pay_make_room_for_a_sample_now_and_then() -> None:
    assert _stretches(_run(200, lambda index: 0.3)) == [3, 1, 4, 1, 65, 2, 65, 2, 57]


def test_nothing_is_tried_where_one_row_cannot_be_as_fast() -> None:
    assert all(_run(200, lambda index: 0.3, OneRow.predicted(5.0)))
    assert all(_run(200, lambda index: 1.0, OneRow(0.3, 1.0))), "without a plan: weights alone take longer"


@pytest.mark.parametrize(("tokens", "passes"), [(2, 13), (4, 21), (16, 27)])
def test_without_a_plan_a_sample_waits_the_longer_the_more_it_may_lose(tokens: int, passes: int) -> None:
    seen = _run(200, lambda index: 1.0, OneRow(0.0, 0.9), tokens)
    loss = 0.9 - 1.0 / tokens  # seconds, were it as slow as it may be
    assert seen.index(False) == passes >= 32 * loss


def test_without_a_plan_slow_drafts_come_to_rest() -> None:
    # All but 0.02 of the second is drafting: one token alone takes no longer than that.
    assert _stretches(_run(40, lambda index: 1.0, OneRow(0.0, 0.02)))[:2] == [2, 34], "at once, for sure"
    seen = _run(400, lambda index: 0.5, OneRow(0.0, 0.5))
    assert sum(seen[60:]) < 20 and any(seen[60:]), "but for a look now and then"


def test_without_a_plan_drafts_that_pay_lose_few_passes() -> None:
    for passes in range(1, 500, 23):
        seen = _run(passes, lambda index: 0.2, OneRow(0.0, 0.2))
        seconds = sum(0.2 if drafted else ALONE for drafted in seen)
        tokens = sum(4 if drafted else 1 for drafted in seen)
        assert tokens / seconds > 0.97 * 4 / 0.2


def test_drafters_that_lose_rest_longer_each_time() -> None:
    # Two passes to see, two without to compare with; then all they get is two, the first to catch up in.
    assert _stretches(_run(800, lambda index: 1.0)) == [2, 34, 2, 128, 2, 512, 2, 118]


def test_what_loses_by_little_is_given_more_passes() -> None:
    first, sample, more, rest, *_ = _stretches(_run(100, lambda index: 0.5))
    assert (first, sample, rest) == (2, 2, 32) and more > 2
    assert sum(_run(300, lambda index: 0.41)) > 280, "no worse than the margin"


def test_drafters_that_pay_again_go_on_and_rest_for_a_short_time_later() -> None:
    seen = _run(600, lambda index: 1.0 if index < 50 or index > 300 else 0.3)
    assert sum(seen[200:300]) >= 96, "all but samples"
    assert 32 <= max(_stretches(seen[300:])[1:3]) <= 34, "though the last rest was longer"


def _mixture(lookups: list[ChainLookup]) -> Mixture:
    return Mixture([Source("table", TableDrafter(random_table(4, 1.0)), greedy_scorer())], lookups)


@pytest.mark.parametrize("lookups", [0, 1])
def test_lookups_go_on_while_drafters_rest(lookups: int) -> None:
    mixture = _mixture([ChainLookup([3, 1], 0.9)] * lookups)
    everyone = tuple(range(1 + lookups))
    assert mixture.active() == everyone
    mixture.standing.payoff.rest = 2
    assert mixture.active() == everyone[1:]
    asked = Asked(everyone[1:])
    one_row = OneRow.predicted(1.0)
    mixture.compare(asked, 1, 1.0, one_row)
    assert mixture.standing.payoff.rest == 2, "a first pass, with the prompt in it, says nothing"
    mixture.standing.payoff.rest = 2
    mixture._passes = 1
    mixture.compare(asked, 1, 1.0, None)
    assert mixture.standing.payoff.rest == 1 and not mixture.standing.payoff.alone.passes
    mixture.compare(asked, 1, 1.0, one_row)
    assert mixture.active() == everyone and mixture.standing.payoff.alone.each == 1.0


@pytest.mark.parametrize("drafters", [0, 1])
def test_what_lookups_find_is_left_out_where_one_row_is_faster(drafters: int) -> None:
    """Where no costs bound it. Passes that found nothing come by themselves, and are what to compare with."""
    mixture = _mixture([ChainLookup([3, 1], 0.9)])
    if not drafters:
        mixture = Mixture([], mixture.lookups)
    mixture.standing.payoff.rest = 1000 * drafters
    mixture._passes, rows = 1, list[int]()
    for index in range(60):
        asked = Asked(mixture.active())
        rows.append(8 if asked.active and index % 2 else 1)  # every other time there is something to be found
        seconds = float(rows[-1])
        mixture.compare_lookups(asked, rows[-1], min(rows[-1], 2), seconds, OneRow(0.0, seconds))
    assert rows[:4] == [1, 8, 1, 8] and set(rows[4:36]) == {1} and rows[36:40].count(8) == 1
