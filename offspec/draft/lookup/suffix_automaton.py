"""Index of all passages of texts that are still growing.

A suffix automaton (Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text"), built
token by token. Its states are classes of passages that end at the same positions, so that the continuations
of a passage and their counts can be read from its state. Texts are branches of a trie: a text starts at the
root or continues from any earlier point of another one, and no passage spans two texts.

The use of counts of all continuations as draft probabilities follows SuffixDecoding (Oliaro et al. 2024,
arXiv 2411.04975).
"""

from array import array
from collections.abc import Mapping

ROOT = 0
NONE = -1

_COUNTED = 64  # suffixes whose counts a new token raises, the longest first
_MANY = 16  # continuations

Ranked = tuple[int, list[tuple[int, int]]]  # how often a passage continued; tokens and their counts


class SuffixAutomaton:
    """The passages of texts of token ids, with their counts.

    A state stands for passages; `length(state)` is the length of the longest. The root is the empty passage.
    n tokens take at most 2 n states of 20 bytes, plus a dictionary in states with several continuations: a
    total of about 100 bytes per token of prose, 200 of random ids. Adding a token takes amortised constant
    time.

    An interrupted `extend` leaves an unusable automaton.

    Counts are exact, except if a text ends with more than 64 nested passages of ever increasing counts, as in
    a loop: then only the longest 64 of them are counted.
    """

    def __init__(self) -> None:
        self._length = array("i", [0])
        self._link = array("i", [NONE])  # the longest suffix that occurs at more positions
        self._count = array("i", [0])
        # Continuations: one token and its state here, or all of them in a dictionary if there are several.
        self._token = array("i", [NONE])
        self._next = array("i", [NONE])
        self._several: dict[int, dict[int, int]] = {}
        self._ranked: dict[int, tuple[int, Ranked]] = {}

    def length(self, state: int) -> int:
        """Return the number of tokens of a state's longest passage."""
        return self._length[state]

    def shorter(self, state: int) -> int:
        """Return the state of the longest suffix that occurs at more positions; NONE for the root."""
        return self._link[state]

    def extend(self, state: int, token: int, counted: bool = True) -> int:
        """Return the state of the whole text so far, `state`, extended by one token.

        counted: whether this is a separate occurrence, and not one that is also added with another text.
        """
        length, link = self._length, self._link
        target = self.follow(state, token)
        if target != NONE:  # another text continued in the same way
            whole = self._own(state, token, target)
        else:
            whole = self._add(length[state] + 1)
            while state != NONE and (target := self.follow(state, token)) == NONE:
                self._lead(state, token, whole)
                state = link[state]
            link[whole] = ROOT if state == NONE else self._own(state, token, target)
        if counted:
            self._raise_counts(whole)
        return whole

    def follow(self, state: int, token: int) -> int:
        """Return the state of a state's passages plus one token; NONE if they never continued with it."""
        if self._token[state] == token:
            return self._next[state]
        several = self._several.get(state)
        return NONE if several is None else several.get(token, NONE)

    def known(self, state: int) -> int:
        """Return the state of the longest suffix with a known continuation; the root if there is none."""
        while self._token[state] == NONE and state != ROOT:
            state = self._link[state]
        return state

    def walk(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """Advance from a passage of `matched` tokens, one of `state`, to the longest suffix of it plus a
        token.

        Returns the state of the longest suffix with a known continuation, and its length in tokens.
        """
        while (target := self.follow(state, token)) == NONE:
            state = self._link[state]
            if state == NONE:
                return ROOT, 0
            matched = self._length[state]
        found = self.known(target)
        return found, min(matched + 1, self._length[found])

    def ranked(self, state: int) -> Ranked:
        """Return how often the passages of a state continued, and the most frequent continuations in order.

        At most sixteen continuations are returned; they are ranked again only after the count of the passage
        has grown by an eighth.
        """
        several = self._several.get(state)
        if several is None:
            token = self._token[state]
            if token == NONE:
                return 0, []
            count = self._count[self._next[state]]
            return count, [(token, count)]
        if len(several) <= _MANY:
            return self._rank(several)
        now = self._count[state]
        kept = self._ranked.get(state)
        if kept is None or 8 * now >= 9 * kept[0]:
            kept = self._ranked[state] = (now, self._rank(several))
        return kept[1]

    def _rank(self, targets: Mapping[int, int]) -> Ranked:
        count = self._count
        pairs = [(token, count[target]) for token, target in targets.items()]
        pairs.sort(key=_by_count, reverse=True)
        return sum(map(_by_count, pairs)), pairs[:_MANY]

    def _add(self, length: int) -> int:
        self._length.append(length)
        self._link.append(NONE)
        self._count.append(0)
        self._token.append(NONE)
        self._next.append(NONE)
        return len(self._length) - 1

    def _lead(self, state: int, token: int, target: int) -> None:
        several = self._several.get(state)
        if self._token[state] in (NONE, token):
            self._token[state], self._next[state] = token, target
        elif several is None:
            several = self._several[state] = {self._token[state]: self._next[state]}
        if several is not None:
            several[token] = target

    def _own(self, state: int, token: int, target: int) -> int:
        """Return the state whose longest passage is `state`'s longest plus the token, which leads to
        `target`.

        If the target has longer passages, the shorter ones move to a new state, since they now end at one
        more position.
        """
        length, link = self._length, self._link
        if length[target] == length[state] + 1:
            return target
        own = self._add(length[state] + 1)
        link[own], link[target] = link[target], own
        self._count[own] = self._count[target]
        self._token[own], self._next[own] = self._token[target], self._next[target]
        if target in self._several:
            self._several[own] = dict(self._several[target])
        while state != NONE and self.follow(state, token) == target:
            self._lead(state, token, own)
            state = link[state]
        return own

    def _raise_counts(self, state: int) -> None:
        count, link = self._count, self._link
        for _ in range(_COUNTED):
            if state == ROOT:
                break
            count[state] += 1
            state = link[state]


def _by_count(pair: tuple[int, int]) -> int:
    return pair[1]
