"""The most hits that are possible, beside trying every eviction."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache

import pytest

from bench.upcycle.belady import most_hits


def by_trying(calls: Sequence[Sequence[int]], slots: int, kept: Sequence[int]) -> int:
    """The same by trying every eviction, and every order of a call's units that are not there."""

    @cache
    def best(number: int, left: frozenset[int], here: frozenset[int]) -> int:
        if not left:
            if number + 1 == len(calls):
                return 0
            following = frozenset(calls[number + 1])
            found = following & here
            return len(found) + best(number + 1, following - found, here)
        results = []
        for unit in left:
            if len(here) < slots:
                results.append(best(number, left - {unit}, here | {unit}))
            for leaving in here if len(here) >= slots else ():
                results.append(best(number, left - {unit}, here - {leaving} | {unit}))
        return max(results)

    return best(-1, frozenset(), frozenset(kept)) if calls else 0


@pytest.mark.parametrize("seed", range(40))
def test_as_trying_every_eviction(seed: int) -> None:
    chosen = random.Random(seed)
    units, slots = chosen.randint(5, 7), chosen.randint(2, 4)
    calls = [chosen.sample(range(units), chosen.randint(1, slots - 1)) for _ in range(7)]
    kept = chosen.sample(range(units), chosen.randint(0, slots))
    assert most_hits(calls, slots, kept) == by_trying(calls, slots, kept)


def test_least_recently_used_has_no_more_hits() -> None:
    chosen = random.Random(1)
    calls = [chosen.choices(range(40), [1 / (n + 1) for n in range(40)])[:1] for _ in range(3000)]
    kept: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for (unit,) in calls:
        hits += unit in kept
        kept[unit] = None
        kept.move_to_end(unit)
        if len(kept) > 10:
            kept.popitem(last=False)
    best = most_hits(calls, 10)
    assert hits < best < len(calls) - 10


def test_with_room_for_all_only_the_first_is_missed() -> None:
    assert most_hits([[1, 2], [2, 3], [3, 1]], 3) == 3
    assert most_hits([[1, 2], [2, 3], [3, 1]], 3, [1, 2, 3]) == 6
    assert most_hits([], 3) == 0
