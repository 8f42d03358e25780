"""Sequoia's rule is exact: every draw of children and every outcome of every test, in fractions.

The fractions go through `judge` itself, which is the rule that `walk_without_replacement` follows.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import permutations
from math import prod
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offspec.sampling.verify_sequoia import judge

Law = list[Fraction]


class Told:
    """In the place of a random number: it is small enough for a test or not, as it is told to be.

    odds: how likely a number is that does so.
    """

    def __init__(self, accepts: bool) -> None:
        self._accepts = accepts
        self._draft = self.odds = Fraction(1)

    def __mul__(self, draft: Fraction) -> "Told":
        self._draft = draft
        return self

    def __lt__(self, target: Fraction) -> bool:
        accepted = min(Fraction(1), target / self._draft)
        self.odds = accepted if self._accepts else 1 - accepted
        return self._accepts


def _law(*parts: int) -> Law:
    return [Fraction(part, sum(parts)) for part in parts]


def _outcomes(target: Law, draft: Law, children: Sequence[int]) -> Iterator[tuple[int, bool, Fraction]]:
    """Every token that the rule may choose, whether it is an accepted child, and the probability of it."""
    laws = np.array(target, dtype=object), np.array(draft, dtype=object)
    for first in range(len(children) + 1):  # the test that is passed, after which there are none
        told = [Told(test == first) for test in range(len(children))]
        accepted, rest = judge(*laws, children, cast(Iterator[float], iter(told)))
        odds = prod((number.odds for number in told), start=Fraction(1))
        if accepted is not None:
            yield accepted, True, odds
        elif odds:
            yield from ((token, False, odds * share) for token, share in enumerate(rest))


def _draws(draft: Law, count: int) -> Iterator[tuple[tuple[int, ...], Fraction]]:
    """Every order in which `count` children, or as many as there are, can be drawn, with its probability."""
    possible = [token for token, share in enumerate(draft) if share]
    for order in permutations(possible, min(count, len(possible))):
        odds, left = Fraction(1), Fraction(1)
        for token in order:
            odds *= draft[token] / left
            left -= draft[token]
        yield order, odds


def _chosen(target: Law, draft: Law, count: int) -> Law:
    """How likely each token is, over all draws and all outcomes of the tests."""
    law = [Fraction(0)] * len(target)
    for children, odds in _draws(draft, count):
        for token, _, share in _outcomes(target, draft, children):
            law[token] += odds * share
    return law


LAWS = {
    "alike": (_law(3, 2, 1), _law(2, 2, 2)),
    "equal": (_law(3, 2, 1), _law(3, 2, 1)),
    "disjoint": (_law(0, 0, 1, 2), _law(3, 1, 0, 0)),
    "a draft that is sure": (_law(1, 2, 3, 4), _law(1, 0, 0, 0)),
    "a target that is sure": (_law(0, 1, 0), _law(4, 1, 3)),
    "opposite": (_law(7, 2, 1, 1), _law(1, 1, 2, 9)),
    "filtered target": (_law(5, 0, 3, 0), _law(2, 5, 2, 1)),
}


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("laws", LAWS.values(), ids=LAWS)
def test_one_node_has_exactly_the_target_s_law(laws: tuple[Law, Law], count: int) -> None:
    assert _chosen(*laws, count) == laws[0]


_PARTS = st.lists(st.integers(0, 6), min_size=3, max_size=4).filter(any)


@settings(max_examples=40, deadline=None)
@given(_PARTS, _PARTS, st.integers(1, 3))
def test_any_node_has_exactly_the_target_s_law(target: list[int], draft: list[int], count: int) -> None:
    size = max(len(target), len(draft))
    laws = [_law(*parts, *[0] * (size - len(parts))) for parts in (target, draft)]
    assert _chosen(laws[0], laws[1], count) == laws[0]


@pytest.mark.parametrize("below", [(1, 2, 3), (3, 2, 1), (2, 0, 2), (0, 0, 0)])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_two_levels_have_exactly_the_target_s_law(count: int, below: tuple[int, ...]) -> None:
    """How many children a node has may depend on its place among its siblings, `below`."""
    first, guessed = _law(4, 2, 1), _law(1, 3, 2)
    seconds = [_law(1, 2, 3), _law(5, 0, 1), _law(2, 2, 1)]
    guesses = [_law(3, 2, 1), _law(1, 4, 4), _law(0, 1, 0)]
    found = defaultdict[tuple[int, int], Fraction](Fraction)
    for children, odds in _draws(guessed, count):
        for token, accepted, share in _outcomes(first, guessed, children):
            places = below[children.index(token)] if accepted else 0
            # A token that was not guessed is followed by another pass, which chooses by the target's law.
            after = _chosen(seconds[token], guesses[token], places)
            for second, likely in enumerate(after):
                found[token, second] += odds * share * likely
    assert found == {(a, b): first[a] * seconds[a][b] for a in range(3) for b in range(3)}


def test_the_test_can_fail() -> None:
    """Children that come likeliest first, as a ranked draft gives them, would be chosen too often."""
    target, draft = LAWS["alike"]
    law = [Fraction(0)] * len(target)
    for token, _, share in _outcomes(target, draft, [0, 1]):
        law[token] += share
    assert law != target


def test_an_excess_that_rounding_ate_changes_nothing() -> None:
    """The draft stands above the target at the one child, by rounding, and below it nowhere."""
    target, draft = np.array([0.5, 0.5]), np.array([0.5 + 2.0**-53, 0.5])
    token, rest = judge(target, draft, [0], iter([1 - 2.0**-53, 0.3]))
    assert token is None and rest.tolist() == [0.5, 0.5]
