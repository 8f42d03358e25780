"""Prompt lookup, compared with a search through the ids."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offspec.draft.lookup.ngram import NgramLookup
from offspec.sampling.noise import GumbelNoise


def search(ids: list[int], path: list[int], longest: int = 4) -> list[int]:
    """Return the continuation of the latest occurrence of the longest n-gram that ends the ids and a path."""
    text = ids + path
    for size in range(min(longest, len(text)), 0, -1):
        for place in range(len(ids) - 1, size - 1, -1):
            if ids[place - size : place] == text[-size:]:
                return ids[place:]
    return []


@given(
    ids=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    path=st.lists(st.integers(0, 3), max_size=5),
    cut=st.integers(1, 40),
    most=st.integers(1, 12),
    max_depth=st.integers(1, 12),
)
@settings(max_examples=100, deadline=None)
def test_lookup_equals_a_search(ids: list[int], path: list[int], cut: int, most: int, max_depth: int) -> None:
    lookup = NgramLookup()
    lookup.start(ids[: len(ids) // 2 + 1])
    lookup.start(ids)
    subtree = lookup.continuations(path, None, most, -math.inf, max_depth)
    assert subtree.token == search(ids, path)[: min(most, max_depth)]
    assert list(subtree.parent) == list(range(-1, len(subtree.token) - 1))
    assert all(log_prob < 0.0 for log_prob in subtree.log_prob)
    lookup.rewind(cut)
    fresh = NgramLookup()
    fresh.start(ids[:cut])
    assert lookup.continuations(path, None, 9, -9.0, 9) == fresh.continuations(path, None, 9, -9.0, 9)


def test_chain_ends_below_the_probability_floor() -> None:
    lookup = NgramLookup()
    lookup.start([*range(50), 0])
    whole = lookup.continuations([], None, 40, -math.inf, 40)
    floor = sum(whole.log_prob[:7])
    cut = lookup.continuations([], None, 40, floor, 40)
    assert list(cut.token) == list(whole.token[:7]) == [1, 2, 3, 4, 5, 6, 7]


def test_longer_matches_have_a_higher_probability() -> None:
    lookup = NgramLookup()
    lookup.start([*range(50), 7])
    short = lookup.continuations([], None, 20, -math.inf, 20).log_prob
    long = lookup.continuations(list(range(8, 30)), None, 1, -math.inf, 1).log_prob
    assert list(short) == sorted(short)  # each accepted token extends the match
    assert long[0] == short[-1]


def test_learning_moves_probabilities_to_observed_rates() -> None:
    for follows in (True, False):
        lookup = NgramLookup()
        ids = [*range(10), 0]
        for turn in range(60):
            lookup.start(ids)
            before = lookup.continuations([], None, 1, -math.inf, 1).log_prob[0]
            tokens = [1, 2, 0] if follows else [100 + turn, 0]
            lookup.learn(tokens)
            after = lookup.continuations([], None, 1, -math.inf, 1).log_prob[0]
            ids = [*ids, *tokens]
        assert math.exp(after) > 0.9 if follows else math.exp(after) < 0.1
        assert after == pytest.approx(before, abs=0.2)


def test_noise_decides_whether_a_draft_token_is_picked() -> None:
    lookup, noise = NgramLookup(), GumbelNoise(3, 60)
    lookup.start([1, 2, 3])
    assert list(lookup.continuations([], noise, 5, -9.0, 5).token) == []
    lookup.start([*range(50), 7])
    plain, coupled = (lookup.continuations([], seed, 1, -math.inf, 1).log_prob[0] for seed in (None, noise))
    probability = math.exp(plain)
    own = float(noise.row(51)[8])
    assert coupled == pytest.approx(-(1 - probability) / probability * math.exp(-own))
