"""The suffix automaton, compared with a search through all texts."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offspec.draft.lookup.suffix_automaton import NONE, ROOT, SuffixAutomaton

Text = tuple[int, ...]


@dataclass
class Texts:
    """The automaton and a reference: each prefix of a text, and its number of occurrences."""

    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    added: Counter[Text] = field(default_factory=Counter)
    state: dict[Text, int] = field(default_factory=lambda: {(): ROOT})

    def extend(self, text: Text, token: int) -> Text:
        longer = (*text, token)
        self.state[longer] = self.automaton.extend(self.state[text], token)
        self.added[longer] += 1
        return longer

    def add(self, tokens: list[int]) -> Text:
        text: Text = ()
        for token in tokens:
            text = self.extend(text, token)
        return text

    def count(self, passage: Text) -> int:
        return sum(times for text, times in self.added.items() if text[len(text) - len(passage) :] == passage)

    def continuations(self, passage: Text) -> dict[int, int]:
        counts = {token: self.count((*passage, token)) for token in range(5)}
        return {token: count for token, count in counts.items() if count}

    def longest(self, text: Text) -> Text:
        """Return the longest suffix of a text with a known continuation."""
        return next(text[i:] for i in range(len(text) + 1) if i == len(text) or self.continuations(text[i:]))


def followed(automaton: SuffixAutomaton, state: int) -> dict[int, int]:
    """Return the continuations of a state's passages, if there are few enough to list all."""
    total, pairs = automaton.ranked(state)
    assert total == sum(count for _, count in pairs)
    return dict(pairs)


def _agrees(texts: Texts, text: Text, state: int, matched: int) -> None:
    longest = texts.longest(text)
    assert matched == len(longest)
    assert followed(texts.automaton, state) == texts.continuations(longest)


# Few tokens, for many repeats; a negative number goes back in the text, or starts another at the root.
steps = st.lists(st.integers(-4, 4), max_size=28)
tokens = st.lists(st.integers(0, 4), max_size=8)


@given(steps=steps, path=tokens)
@settings(max_examples=120, deadline=None)
def test_longest_known_suffix_and_its_continuations(steps: list[int], path: list[int]) -> None:
    texts = Texts()
    text: Text = ()
    for step in steps:
        text = texts.extend(text, step) if step >= 0 else text[:step] if step > -4 else ()
    state = texts.automaton.known(texts.state[text])
    matched = texts.automaton.length(state)
    _agrees(texts, text, state, matched)
    for token in path:
        text = (*text, token)
        state, matched = texts.automaton.walk(state, matched, token)
        _agrees(texts, text, state, matched)


@pytest.mark.parametrize("seed", range(4))
def test_shorter_suffixes_down_to_the_root(seed: int) -> None:
    """For every text, once all are added: passages that share positions at first may differ later."""
    chance, texts = random.Random(seed), Texts()
    text: Text = ()
    for _ in range(60):
        text = texts.extend(text, chance.randrange(3)) if chance.random() > 0.1 else text[: len(text) // 2]
    for known, state in texts.state.items():
        before = len(known) + 1
        while state != NONE:
            length = texts.automaton.length(state)
            assert length < before
            assert followed(texts.automaton, state) == texts.continuations(known[len(known) - length :])
            state, before = texts.automaton.shorter(state), length
        assert before == 0


def test_continuations_are_ranked_by_their_counts() -> None:
    """Only the most frequent of many are returned, and a growing passage is ranked again."""
    texts = Texts()
    for token, times in {7: 1, 8: 3, 9: 2}.items():
        for _ in range(times):
            texts.add([1, token])
    state, _ = texts.automaton.walk(ROOT, 0, 1)
    assert texts.automaton.ranked(state) == (6, [(8, 3), (9, 2), (7, 1)])
    assert texts.automaton.ranked(ROOT)[1][0] == (1, 6)
    texts = Texts()
    for token in range(2, 42):
        for _ in range(1 + token // 20):
            texts.add([1, token])
    state, _ = texts.automaton.walk(ROOT, 0, 1)
    total, pairs = texts.automaton.ranked(state)
    assert total == 64 and len(pairs) == 16
    assert {count for _, count in pairs} == {2, 3}
    for _ in range(8):
        texts.add([1, 5])
    assert texts.automaton.ranked(state)[1][0] == (5, 9)


def test_longest_passages_are_counted_in_a_loop() -> None:
    automaton, state = SuffixAutomaton(), ROOT
    for _ in range(500):
        state = automaton.extend(state, 3)
    assert 64 <= followed(automaton, ROOT)[3] <= 500
    state = automaton.known(state)
    assert automaton.length(state) == 499 and followed(automaton, state) == {3: 1}
