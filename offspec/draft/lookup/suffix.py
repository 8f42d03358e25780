"""Suffix lookup: drafts the continuations of earlier occurrences of the text's suffix.

A suffix automaton indexes every passage of the prompt, the output and, if given, other texts. The longest
suffix of the committed ids with a known continuation gives the first draft tokens, shorter suffixes add
alternatives, and each draft token is continued from there, so that a copied passage is drafted to its end
(SuffixDecoding: Oliaro et al. 2024, arXiv 2411.04975).
"""

import copy
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from offspec.draft.base import Lookup
from offspec.draft.growing_tree import Subtree
from offspec.draft.lookup.match_acceptance import MatchAcceptance, bucket
from offspec.draft.lookup.subtree import TextState, grow_subtree
from offspec.draft.lookup.suffix_automaton import ROOT, SuffixAutomaton
from offspec.sampling.noise import GumbelNoise

_CONTEXTS = 2  # suffixes that are used: the longest, and the next one that has more continuations
_GUESSES = 8  # maximum continuations of one place
_REST = 0.05  # remaining probability below which no shorter context is used
_WITHIN = 32  # tokens kept before the end of an abandoned text, together with its continuation


@dataclass(frozen=True, slots=True)
class _PastText:
    """A finished text. Its first `lead` tokens also occur in another text and are counted there."""

    ids: "array[int]"
    lead: int = 0


@dataclass(frozen=True, slots=True)
class _TextHistory:
    """All texts, from which everything else can be rebuilt: past texts, oldest first, and the committed ids.

    The first `skipped` ids are kept but no longer searched. The ids grow in place; any other change replaces
    the history in one step, so that no text is ever missing or present twice.
    """

    past: tuple[_PastText, ...]
    ids: "array[int]"
    skipped: int = 0

    @property
    def tokens(self) -> int:
        """Number of searched tokens."""
        return sum(len(passage.ids) for passage in self.past) + len(self.ids) - self.skipped

    def newest(self, room: int) -> "_TextHistory":
        """Return the newest `room` tokens; committed ids take precedence over past texts."""
        skipped = max(len(self.ids) - room, self.skipped)
        room -= len(self.ids) - skipped
        past: list[_PastText] = []
        for passage in reversed(self.past):
            if room <= 0:
                break
            cut = max(len(passage.ids) - room, 0)
            past.append(_PastText(passage.ids[cut:], max(passage.lead - cut, 0)))
            room -= len(passage.ids)
        return _TextHistory(tuple(reversed(past)), self.ids, skipped)


@dataclass(frozen=True, slots=True)
class _Guesses:
    """Continuations of one place: the counts in each context, and the likeliest tokens with their
    probabilities.
    """

    contexts: list[dict[int, int]]  # bucket by token
    likely: list[tuple[int, float]]


def _by_probability(guess: tuple[int, float]) -> float:
    return guess[1]


class SuffixLookup(Lookup):
    """Finds the longest match of the committed ids in all texts so far, and all of its continuations.

    `limit` is the maximum tokens of text that are held, at about 100 bytes each for prose, 200 for random
    ids. When there are more, the newest half is kept: that takes some 3 microseconds per token, once every
    limit / 2 tokens. An interrupted call, as after Ctrl-C, leaves the texts as before or as after the call;
    the next call rebuilds the automaton.
    """

    name = "suffix"

    def __init__(self, limit: int = 2**18) -> None:
        assert limit > 1
        self._limit = limit
        self._matches = MatchAcceptance()
        self._reset()

    def _reset(self) -> None:
        self._whole = False  # while the data derived from the texts is being changed
        self._held = _TextHistory((), array("q"))
        self._build()
        self._finish_update()

    def _build(self) -> None:
        """Rebuild everything that derives from the texts."""
        self._texts = SuffixAutomaton()
        self._tokens = self._held.tokens
        self._states = array("i", [ROOT])  # of the first 0, 1, 2, ... ids
        for passage in self._held.past:
            self._insert(passage)
        self._states.extend([ROOT] * self._held.skipped)
        self._append_ids(self._held.ids[self._held.skipped :])

    def _finish_update(self) -> None:
        """Finish a change: enforce the limit and find the state of the committed ids in the texts."""
        if self._tokens > self._limit:
            self._held = self._held.newest(self._limit // 2)
            self._build()
        state = self._texts.known(self._states[-1])
        self._place: TextState = (state, self._texts.length(state))
        self._seen: dict[TextState, _Guesses] = {}
        self._whole = True

    def _rebuild_if_interrupted(self) -> None:
        """Complete an interrupted change."""
        if not self._whole:
            self._build()
            self._finish_update()

    def add_text(self, ids: Sequence[int]) -> None:
        """Add an earlier text, in ids of the same vocabulary; of a long one only the last limit / 2 are
        kept.
        """
        self._rebuild_if_interrupted()
        passage, held = _PastText(array("q", ids[-self._limit // 2 :])), self._held
        self._whole = False
        self._held = _TextHistory((*held.past, passage), held.ids, held.skipped)
        self._insert(passage)
        self._tokens += len(passage.ids)
        self._finish_update()

    def fork(self) -> "SuffixLookup":
        """Return a lookup with a separate automaton over shared texts."""
        lookup = SuffixLookup(self._limit)
        lookup._matches = copy.deepcopy(self._matches)
        lookup._held = _TextHistory(self._held.past, array("q"))
        lookup._build()
        lookup._finish_update()
        return lookup

    def start(self, ids: Sequence[int]) -> None:
        self.rewind(len(ids))
        added = array("q", ids[len(self._held.ids) :])
        self._whole = False
        self._held.ids.extend(added)
        self._append_ids(added)
        self._tokens += len(added)
        self._finish_update()

    def continuations(
        self, path: Sequence[int], noise: GumbelNoise | None, most: int, floor: float, max_depth: int
    ) -> Subtree:
        self._rebuild_if_interrupted()
        place = self._place
        for token in path:
            place = self.walk(place, token)
        return grow_subtree(self, place, len(self._held.ids) + len(path), noise, most, floor, max_depth)

    def learn(self, tokens: Sequence[int]) -> None:
        self._rebuild_if_interrupted()
        place = self._place
        for token in tokens:
            for context in self._at(place).contexts:
                for guess, index in context.items():
                    self._matches.learn(index, guess == token)
                if token in context:
                    break
            place = self.walk(place, token)
        self._matches.end_pass()

    def rewind(self, length: int) -> None:
        self._rebuild_if_interrupted()
        held = self._held
        if length >= len(held.ids):
            return
        first = max(length - _WITHIN, held.skipped)
        passage = _PastText(held.ids[first:], max(length - first, 0))
        self._whole = False
        self._held = _TextHistory((*held.past, passage), held.ids[:length], min(held.skipped, length))
        del self._states[length + 1 :]
        self._tokens += passage.lead
        self._finish_update()

    def close(self) -> None:
        self._reset()

    def walk(self, place: TextState, token: int) -> TextState:
        return self._texts.walk(*place, token)

    def next_tokens(self, place: TextState) -> Sequence[tuple[int, float]]:
        return self._at(place).likely

    def _at(self, place: TextState) -> _Guesses:
        seen = self._seen.get(place)
        if seen is None:
            seen = self._seen[place] = self._guess(*place)
        return seen

    def _guess(self, state: int, matched: int) -> _Guesses:
        """Return the continuations of the longest suffix, plus those of shorter ones for the remaining
        probability.
        """
        contexts: list[dict[int, int]] = []
        likely: list[tuple[int, float]] = []
        known: set[int] = set()
        rest = 1.0
        while state != ROOT and rest > _REST and len(contexts) < _CONTEXTS and len(known) < _GUESSES:
            context = self._context(state, matched, known)
            if context:
                said = [(token, self._matches.probability(index)) for token, index in context.items()]
                whole = sum([probability for _, probability in said])
                scale = rest / max(whole, 1.0)
                likely += [(token, scale * probability) for token, probability in said]
                rest -= scale * whole
                contexts.append(context)
                known.update(context)
            state = self._texts.shorter(state)
            matched = self._texts.length(state)
        likely.sort(key=_by_probability, reverse=True)
        return _Guesses(contexts, likely)

    def _context(self, state: int, matched: int, known: set[int]) -> dict[int, int]:
        """Return the continuations that longer suffixes do not have: bucket by token."""
        total, ranked = self._texts.ranked(state)
        if len(ranked) <= len(
            known
        ):  # continuations of a longer suffix are also continuations of a shorter one
            return {}
        if known:
            total -= sum([count for token, count in ranked if token in known])
            ranked = [pair for pair in ranked if pair[0] not in known]
        longest = not known
        room = _GUESSES - len(known)
        return {token: bucket(matched, count, total, longest) for token, count in ranked[:room]}

    def _insert(self, passage: _PastText) -> None:
        state = ROOT
        for place, token in enumerate(passage.ids):
            state = self._texts.extend(state, token, counted=place >= passage.lead)

    def _append_ids(self, ids: Sequence[int]) -> None:
        for token in ids:
            self._states.append(self._texts.extend(self._states[-1], token))
