"""Learned acceptance rate of matches."""

from __future__ import annotations

import random
from itertools import product

import pytest

from offspec.draft.lookup.match_acceptance import BUCKETS, MatchAcceptance, bucket

LENGTHS = (1, 2, 3, 4, 5, 7, 11, 17)
SHARES = ((1, 1), (1, 2), (1, 4), (1, 9), (2, 2), (2, 3), (2, 7), (2, 50), (8, 8), (8, 9), (8, 30), (8, 99))


def test_each_case_has_its_own_bucket() -> None:
    cases = product(LENGTHS, SHARES, (True, False))
    found = [bucket(length, count, total, longest) for length, (count, total), longest in cases]
    assert sorted(found) == list(range(BUCKETS))
    for one, other in (((5, 1, 1), (6, 1, 1)), ((17, 2, 2), (900, 3, 3)), ((2, 4, 40), (2, 9, 99))):
        assert bucket(*one, True) == bucket(*other, True), "cases that are much alike share one"


def test_prior_favours_longer_and_more_certain_matches() -> None:
    matches = MatchAcceptance()
    by_length = [matches.probability(bucket(length, 1, 1, True)) for length in LENGTHS]
    assert by_length == sorted(by_length) and 0.0 < by_length[0] < 0.5 and 0.9 < by_length[-1] < 1.0
    by_share = [matches.probability(bucket(4, 2, total, True)) for total in (2, 3, 7, 50)]
    assert by_share == sorted(by_share, reverse=True)
    by_count = [matches.probability(bucket(4, count, count, True)) for count in (1, 2, 8)]
    assert by_count == sorted(by_count)


@pytest.mark.parametrize("truth", [0.05, 0.5, 0.9])
def test_learning_approaches_the_true_rate(truth: float) -> None:
    rng, matches = random.Random(4), MatchAcceptance()
    one, other = bucket(3, 1, 1, True), bucket(9, 1, 1, True)
    untouched = matches.probability(other)
    found = []
    for turn in range(1500):
        matches.learn(one, rng.random() < truth)
        matches.end_pass()
        if turn > 500:
            found.append(matches.probability(one))
    assert sum(found) / len(found) == pytest.approx(truth, abs=0.04)
    assert matches.probability(other) == pytest.approx(untouched)


def test_changes_are_learned_and_old_observations_fade() -> None:
    matches, index = MatchAcceptance(), bucket(1, 1, 1, True)
    prior = matches.probability(index)
    for hit in (True, False):
        for _ in range(1000):
            matches.learn(index, hit)
            matches.end_pass()
        assert matches.probability(index) == pytest.approx(float(hit), abs=0.03)
    for _ in range(3000):
        matches.end_pass()
    assert matches.probability(index) == pytest.approx(prior, abs=1e-3)
