"""Every passage of some texts, found while the texts still grow.

A suffix automaton (Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text"), built
token by token. Its states are classes of passages that end at the same places, so that what followed a
passage, and how often, is read off its state. Texts are branches of a trie: one starts at the root or goes on
from any earlier point of another, and no passage runs from the end of one into the next.

The use of counts of all continuations as guesses follows SuffixDecoding (Oliaro et al. 2024, arXiv
2411.04975).
"""

from array import array
from collections.abc import Mapping

ROOT = 0
NONE = -1

_COUNTED = 64  # suffixes whose counts a new token raises, the longest first
_MANY = 16  # continuations

Ranked = tuple[int, list[tuple[int, int]]]  # how often a passage went on; tokens and their counts


class SuffixAutomaton:
    """The passages of texts of token ids, with their counts.

    A state stands for passages; `length(state)` is that of its longest. The root is the empty passage.
    n tokens take at most 2 n states of 20 bytes and, in states where texts part, a dictionary: in all about
    100 bytes a token for prose, 200 for random ids. Adding a token takes amortised constant time.

    What breaks off `extend` leaves an automaton that is of no more use.

    Counts are exact, except where a text ends with more than 64 passages, each inside the next, which
    occur ever more often, as in a loop: then only the longest 64 of them are counted on.
    """

    def __init__(self) -> None:
        self._length = array("i", [0])
        self._link = array("i", [NONE])  # the longest suffix that occurs in more places
        self._count = array("i", [0])
        # What follows: one token and its state here, all of them in a dictionary where there are several.
        self._token = array("i", [NONE])
        self._next = array("i", [NONE])
        self._several: dict[int, dict[int, int]] = {}
        self._ranked: dict[int, tuple[int, Ranked]] = {}

    def length(self, state: int) -> int:
        """Tokens of the longest passage of a state."""
        return self._length[state]

    def shorter(self, state: int) -> int:
        """The state of the longest suffix that occurs in more places; NONE behind the root."""
        return self._link[state]

    def extend(self, state: int, token: int, counted: bool = True) -> int:
        """The state of a whole text so far, `state`, with one more token.

        counted: whether this is an occurrence by itself, and not one that is also added with another text.
        """
        length, link = self._length, self._link
        target = self.follow(state, token)
        if target != NONE:  # another text went on like this
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
        """The state of a state's passages with one more token; NONE where they never went on so."""
        if self._token[state] == token:
            return self._next[state]
        several = self._several.get(state)
        return NONE if several is None else several.get(token, NONE)

    def known(self, state: int) -> int:
        """The state of the longest suffix that went on before; the root where none did."""
        while self._token[state] == NONE and state != ROOT:
            state = self._link[state]
        return state

    def walk(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """From a passage of `matched` tokens, one of `state`, on to the longest suffix of it and a token.

        Returns the state of the longest that went on before, and its tokens.
        """
        while (target := self.follow(state, token)) == NONE:
            state = self._link[state]
            if state == NONE:
                return ROOT, 0
            matched = self._length[state]
        found = self.known(target)
        return found, min(matched + 1, self._length[found])

    def ranked(self, state: int) -> Ranked:
        """How often the passages of a state went on, and how, the most frequent continuations first.

        Where there are many, the sixteen most frequent; they are ranked again only after the passage has
        come an eighth more often.
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
        """The state whose longest passage is that of `state` with the token, which leads to `target`.

        Where the target has longer passages, the shorter ones move to a state of their own, for from now on
        they end at one place more.
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
