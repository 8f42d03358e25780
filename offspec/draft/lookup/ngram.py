"""Prompt lookup (n-gram): copies the text after the latest earlier occurrence of the last few tokens.

Saxena 2023, "Prompt lookup decoding"; also in transformers and LoRAX. It searches the longest n-gram that
ends the text and occurred before, takes its latest occurrence, and drafts the following tokens as a chain.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from offspec.draft.base import Lookup
from offspec.draft.growing_tree import Subtree
from offspec.draft.lookup.match_acceptance import MatchAcceptance, bucket
from offspec.sampling.noise import GumbelNoise, gumbel_at, log_prob_given_noise

_LONGEST = 4  # tokens of an n-gram
_COMPARED = 17  # maximum match length that is counted separately


@dataclass(slots=True)
class _Text:
    """Token ids, and for each n-gram in them the position after its latest occurrence."""

    ids: list[int]
    after: dict[tuple[int, ...], int] = field(default_factory=dict)
    indexed: int = 0  # number of indexed positions

    def index(self) -> None:
        """Index the n-grams of new ids, and those of an interrupted call again."""
        for place in range(self.indexed, len(self.ids)):
            for size in range(1, min(_LONGEST, place) + 1):
                self.after[tuple(self.ids[place - size : place])] = place
        self.indexed = len(self.ids)


class NgramLookup(Lookup):
    """Drafts the continuation of the latest occurrence of the last four, three, two or one tokens.

    The acceptance rate of chains is learned by the length of the match, which may exceed the n-gram. Takes
    about 80 bytes per token of prose, 420 per token of random ids. The next call repairs an interrupted one,
    as after Ctrl-C.
    """

    name = "lookup"

    def __init__(self) -> None:
        self._matches = MatchAcceptance()
        self._text = _Text([])

    def fork(self) -> "NgramLookup":
        lookup = NgramLookup()
        lookup._matches = copy.deepcopy(self._matches)
        return lookup

    def start(self, ids: Sequence[int]) -> None:
        self.rewind(len(ids))
        self._text.ids.extend(ids[len(self._text.ids) :])
        self._text.index()

    def continuations(
        self, path: Sequence[int], noise: GumbelNoise | None, most: int, floor: float, max_depth: int
    ) -> Subtree:
        """Return a chain of continuations."""
        self._text.index()
        place, matched = self._find(path)
        tokens = self._text.ids[place : place + min(most, max_depth)]
        probability = [self._matches.probability(_bucket(matched + step)) for step in range(len(tokens))]
        log_probs = np.log(probability)
        if noise is not None:
            first = len(self._text.ids) + len(path)
            positions = range(first, first + len(tokens))
            log_probs = log_prob_given_noise(np.array(probability), gumbel_at(noise.key, positions, tokens))
        count = int((np.cumsum(log_probs) >= floor).sum())
        return Subtree(list(range(-1, count - 1)), tokens[:count], log_probs[:count].tolist())

    def learn(self, tokens: Sequence[int]) -> None:
        self._text.index()
        place, matched = self._find([])
        for step, token in enumerate(tokens):
            guessed = place < len(self._text.ids)
            hit = guessed and self._text.ids[place] == token
            if guessed:
                self._matches.learn(_bucket(matched), hit)
            place, matched = (place + 1, matched + 1) if hit else self._find(tokens[: step + 1])
        self._matches.end_pass()

    def rewind(self, length: int) -> None:
        if length < len(self._text.ids):
            self._text = _Text(self._text.ids[:length])
            self._text.index()

    def close(self) -> None:
        self._text = _Text([])

    def _find(self, path: Sequence[int]) -> tuple[int, int]:
        """Return the position after an earlier occurrence of the text plus `path`, or the end, and the
        matched tokens.
        """
        tail = [*self._text.ids[-_COMPARED:], *path][-_COMPARED:]
        for size in range(min(_LONGEST, len(tail)), 0, -1):
            place = self._text.after.get(tuple(tail[-size:]))
            if place is not None:
                return place, self._matching(tail, place)
        return len(self._text.ids), 0

    def _matching(self, tail: Sequence[int], place: int) -> int:
        """Return the number of tokens before a position that match the end of the tail."""
        most = min(len(tail), place)
        return next((n for n in range(most) if tail[-1 - n] != self._text.ids[place - 1 - n]), most)


def _bucket(matched: int) -> int:
    """Return the bucket; the lookup counts only one continuation."""
    return bucket(matched, 1, 1, True)
