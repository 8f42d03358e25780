"""The suffix lookup: its draft tokens, and its index after changes to the texts."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offspec.draft.growing_tree import Subtree
from offspec.draft.lookup.suffix import SuffixLookup
from offspec.sampling.noise import GumbelNoise

PASSAGE = [*range(100, 200)]


def scores(subtree: Subtree) -> list[float]:
    """Return the log-probability of each node's path."""
    found: list[float] = []
    for parent, log_prob in zip(subtree.parent, subtree.log_prob, strict=True):
        found.append(log_prob + (found[parent] if parent >= 0 else 0.0))
    return found


def depths(subtree: Subtree) -> list[int]:
    found: list[int] = []
    for parent in subtree.parent:
        found.append(1 + (found[parent] if parent >= 0 else 0))
    return found


def most_likely(subtree: Subtree) -> list[int]:
    """Return the tokens along the most likely children."""
    path: list[int] = []
    node = -1
    while children := [i for i, parent in enumerate(subtree.parent) if parent == node]:
        node = max(children, key=lambda child: subtree.log_prob[child])
        path.append(subtree.token[node])
    return path


def below(lookup: SuffixLookup, path: list[int] | None = None, noise: GumbelNoise | None = None) -> Subtree:
    return lookup.continuations(path or [], noise, 96, math.log(0.01), 96)


@given(
    ids=st.lists(st.integers(0, 5), min_size=1, max_size=60),
    path=st.lists(st.integers(0, 5), max_size=4),
    most=st.integers(1, 20),
    floor=st.floats(-8, -0.1),
    max_depth=st.integers(1, 6),
    seed=st.none() | st.integers(0, 2**64 - 1),
)
@settings(max_examples=80, deadline=None)
def test_subtree_respects_its_limits(
    ids: list[int], path: list[int], most: int, floor: float, max_depth: int, seed: int | None
) -> None:
    lookup = SuffixLookup()
    lookup.start(ids)
    noise = None if seed is None else GumbelNoise(seed, 6)
    subtree = lookup.continuations(path, noise, most, floor, max_depth)
    assert len(subtree.parent) == len(subtree.token) == len(subtree.log_prob) <= most
    assert all(-1 <= parent < node for node, parent in enumerate(subtree.parent))
    assert len(set(zip(subtree.parent, subtree.token, strict=True))) == len(subtree.token)
    assert min(scores(subtree), default=0.0) >= floor
    assert max(depths(subtree), default=0) <= max_depth
    shares = defaultdict[int, float](float)
    for parent, log_prob in zip(subtree.parent, subtree.log_prob, strict=True):
        shares[parent] += math.exp(log_prob)
    assert seed is not None or max(shares.values(), default=0.0) <= 1.0 + 1e-9, "siblings share one"
    if seed is None:
        few, more = (lookup.continuations(path, None, nodes, -4.0, 8) for nodes in (5, 40))
        assert sorted(scores(few)) == pytest.approx(sorted(sorted(scores(more))[-len(few.token) :]))


def test_copied_passage_is_drafted_to_its_end() -> None:
    lookup = SuffixLookup()
    lookup.start([*PASSAGE, 1, 2, *PASSAGE[:20]])
    found = most_likely(below(lookup))
    assert len(found) >= 60 and found == [*PASSAGE[20:], 1, 2, *PASSAGE][: len(found)]


def test_path_extends_the_match_with_fallback_to_shorter_ones() -> None:
    lookup = SuffixLookup()
    lookup.start([1, 2, 3, 4, 9, 3, 7, 9, 1, 2])
    assert most_likely(below(lookup))[0] == 3
    assert most_likely(below(lookup, [3]))[0] == 4  # as after 1 2 3, though 7 came later
    assert most_likely(below(lookup, [8, 3]))[0] in (
        4,
        7,
    )  # 8 3 is new, and both tokens have followed 3 alone
    assert {*below(lookup, [8, 3]).token} >= {4, 7}
    assert below(lookup, [55]).token == []


def test_unseen_text_gives_no_tokens() -> None:
    lookup = SuffixLookup()
    lookup.start([1, 2, 3])
    assert below(lookup).token == []
    lookup.learn([4, 5])
    lookup.start([1, 2, 3, 4, 5])
    assert below(lookup).token == []
    lookup.start([*PASSAGE, 1, *PASSAGE[:9]])
    assert below(lookup).token
    lookup.close()
    lookup.start([1, *PASSAGE[:9]])
    assert below(lookup).token == [], "a closed lookup has no texts"


def test_rewound_text_is_found_at_the_new_position() -> None:
    lookup = SuffixLookup()
    lookup.start([1, 2, *PASSAGE])
    lookup.rewind(12)
    lookup.start([1, 2, *PASSAGE[:10], 5])  # the new text continues differently
    assert below(lookup).token == []
    lookup.start([1, 2, *PASSAGE[:10], 5, *PASSAGE[30:40]])
    assert most_likely(below(lookup)) == PASSAGE[40:]
    lookup.rewind(0)
    lookup.start([8, *PASSAGE[:10]])
    assert most_likely(below(lookup))[:20] == PASSAGE[10:30]
    lookup = SuffixLookup()
    lookup.start([1, 2, 3, *PASSAGE])
    lookup.rewind(2)
    lookup.start([1, 2, 3])  # the same prompt again
    assert most_likely(below(lookup)) == PASSAGE[: len(most_likely(below(lookup)))] != []


def test_added_texts_are_found_and_separate() -> None:
    lookup = SuffixLookup()
    lookup.add_text(PASSAGE[:50])
    lookup.add_text(PASSAGE[50:])
    lookup.start([3, *PASSAGE[40:45]])
    assert most_likely(below(lookup)) == PASSAGE[45:50]
    lookup.add_text([3, *PASSAGE[40:45], 77])  # also after the start
    assert most_likely(below(lookup)) == [77]


def test_oldest_texts_are_evicted() -> None:
    lookup = SuffixLookup(limit=300)
    for first in range(0, 1000, 100):
        lookup.add_text(range(first, first + 100))
    lookup.start([5000, 5001, 910, 911])
    assert most_likely(below(lookup))[0] == 912
    lookup.start([5000, 5001, 910, 911, 10, 11])
    assert below(lookup).token == []


def test_text_beyond_the_limit_can_grow() -> None:
    lookup = SuffixLookup(limit=200)
    ids = [*range(100), *range(1000, 1250), *range(1200, 1220)]
    for end in range(10, len(ids) + 1, 10):
        lookup.start(ids[:end])
    assert most_likely(below(lookup))[:5] == [1220, 1221, 1222, 1223, 1224]
    lookup.rewind(50)
    lookup.start([*ids[:50], 1200, 1201])
    assert most_likely(below(lookup))[:2] == [1202, 1203]


def test_probabilities_follow_acceptance() -> None:
    surest = {}
    for follows in (True, False):
        lookup = SuffixLookup()
        ids = [1, 2, 3]
        lookup.start(ids)
        for turn in range(200):
            token = 2 if follows else 10 + turn
            lookup.learn([token, 3, 1])
            ids += [token, 3, 1]
            lookup.start(ids)
        subtree = below(lookup)
        surest[follows] = math.exp(max(subtree.log_prob, default=-9.0))
    assert surest[True] > 0.97 and surest[False] < 0.1


def test_acceptance_of_long_matches_does_not_affect_short_ones() -> None:
    lookup = SuffixLookup()
    lookup.start([*PASSAGE, 500, *PASSAGE[:20]])
    before = max(below(lookup, [777, PASSAGE[5]]).log_prob)
    for start, end in pairwise(range(20, 100, 5)):
        lookup.learn(PASSAGE[start:end])
        lookup.start([*PASSAGE, 500, *PASSAGE[:end]])
    assert max(below(lookup, [777, PASSAGE[5]]).log_prob) == pytest.approx(before)


def test_noise_orders_tokens_by_the_targets_choice() -> None:
    lookup = SuffixLookup()
    lookup.start([1, 2, 8, 1, 3, 8, 1, 4, 8, 1, 5, 8, 1])
    noise = GumbelNoise(11, 16)
    subtree = below(lookup, [], noise)
    firsts = [token for parent, token in zip(subtree.parent, subtree.token, strict=True) if parent == -1]
    row = noise.row(13)  # of the first token after the thirteen ids
    best = max((2, 3, 4, 5), key=lambda token: float(row[token]))
    assert best in firsts and most_likely(subtree)[0] == best
