"""Drafters rest for as long as passes without any are faster, as this run itself has seen."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from offspec.draft.mix.mixture import Asked, Mixture, Source
from offspec.draft.mix.payoff import Payoff
from tests.draft.test_mixture import ChainLookup, _scorer
from tests.planners.tables import TableDrafter, random_table

ALONE = 0.1  # seconds of a pass of one row


def _run(passes: int, drafted: Callable[[int], float], predicted: float = ALONE) -> list[bool]:
    """Which of so many passes have drafters, where those take so long, by their number, for 4 tokens."""
    payoff, seen = Payoff(), list[bool]()
    for index in range(passes):
        seen.append(not payoff.rest)
        tokens, seconds = (4, drafted(index)) if seen[-1] else (1, ALONE)
        payoff.observe(seen[-1], tokens, seconds, predicted)
    return seen


def _stretches(seen: list[bool]) -> list[int]:
    """Lengths of stretches, with drafters, without, and so on."""
    cuts = [0, *(i for i in range(1, len(seen)) if seen[i] != seen[i - 1]), len(seen)]
    return [end - start for start, end in pairwise(cuts)]


def test_drafters_that_pay_make_room_for_a_sample_now_and_then() -> None:
    assert _stretches(_run(200, lambda index: 0.3)) == [2, 2, 65, 2, 65, 2, 62]


def test_nothing_is_tried_where_one_row_cannot_be_as_fast() -> None:
    assert all(_run(500, lambda index: 0.3, predicted=5.0))


def test_drafters_that_lose_rest_longer_each_time() -> None:
    # Two passes to see, two without to compare with; then all they get is three, the first to catch up in.
    assert _stretches(_run(800, lambda index: 1.0)) == [2, 34, 3, 128, 3, 512, 3, 115]


def test_what_loses_by_little_is_given_more_passes() -> None:
    first, sample, more, rest, *_ = _stretches(_run(100, lambda index: 0.5))
    assert (first, sample, rest) == (2, 2, 32) and more > 2
    assert sum(_run(300, lambda index: 0.41)) > 280, "no worse than the margin"


def test_drafters_that_pay_again_go_on_and_rest_for_a_short_time_later() -> None:
    seen = _run(600, lambda index: 1.0 if index < 50 or index > 300 else 0.3)
    assert sum(seen[200:300]) >= 96, "all but samples"
    assert 32 <= max(_stretches(seen[300:])[1:3]) <= 34, "though the last rest was longer"


def _mixture(lookups: list[ChainLookup]) -> Mixture:
    return Mixture([Source("table", TableDrafter(random_table(4, 1.0)), _scorer())], lookups)


@pytest.mark.parametrize("lookups", [0, 1])
def test_lookups_go_on_while_drafters_rest(lookups: int) -> None:
    mixture = _mixture([ChainLookup([3, 1], 0.9)] * lookups)
    everyone = tuple(range(1 + lookups))
    assert mixture.active() == everyone
    mixture.standing.payoff.rest = 2
    assert mixture.active() == everyone[1:]
    asked = Asked(everyone[1:])
    mixture.compare(asked, 1, 1.0, 1.0)
    assert mixture.standing.payoff.rest == 2, "a first pass, with the prompt in it, says nothing"
    mixture.standing.payoff.rest = 2
    mixture._passes = 1
    mixture.compare(asked, 1, 1.0, None)
    assert mixture.standing.payoff.rest == 1 and not mixture.standing.payoff.alone.passes
    mixture.compare(asked, 1, 1.0, 1.0)
    assert mixture.active() == everyone and mixture.standing.payoff.alone.each == 1.0
