"""Guesses from texts: what followed the last time the text was here.

Every earlier passage of the prompt, the output and, where there are some, other texts is at hand in a suffix
automaton. The longest suffix of the committed ids that went on before gives the first guesses, shorter ones
give what else might come, and each guess is followed on from there, so that a copied passage is guessed as
long as it lasts (SuffixDecoding: Oliaro et al. 2024, arXiv 2411.04975).
"""

import copy
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from offspec.draft.base import Lookup
from offspec.draft.growing_tree import Subtree
from offspec.draft.lookup.hit_rates import Matches, bucket
from offspec.draft.lookup.subtree import TextState, grow_subtree
from offspec.draft.lookup.suffix_automaton import ROOT, SuffixAutomaton
from offspec.sampling.noise import GumbelNoise

_CONTEXTS = 2  # suffixes that are asked: the longest, and the next that knows more continuations
_GUESSES = 8  # most continuations of one place
_REST = 0.05  # probability that is not worth asking another context for
_WITHIN = 32  # tokens before the end of a text that is left, kept with what it went on with


@dataclass(frozen=True, slots=True)
class _Passage:
    """A text that is over. Its first `lead` tokens stand in another as well, and are counted there."""

    ids: "array[int]"
    lead: int = 0


@dataclass(frozen=True, slots=True)
class _Held:
    """The texts, of which all else can be made again: the passages, the oldest first, and the committed ids.

    The first `skipped` ids are known, but no longer searched. The ids grow in place; any other change
    replaces the whole in one step, so that there is no moment at which a text is missing or there twice.
    """

    past: tuple[_Passage, ...]
    ids: "array[int]"
    skipped: int = 0

    @property
    def tokens(self) -> int:
        """How many are to be searched."""
        return sum(len(passage.ids) for passage in self.past) + len(self.ids) - self.skipped

    def newest(self, room: int) -> "_Held":
        """Its newest tokens, `room` of them; committed ids take precedence over passages."""
        skipped = max(len(self.ids) - room, self.skipped)
        room -= len(self.ids) - skipped
        past: list[_Passage] = []
        for passage in reversed(self.past):
            if room <= 0:
                break
            cut = max(len(passage.ids) - room, 0)
            past.append(_Passage(passage.ids[cut:], max(passage.lead - cut, 0)))
            room -= len(passage.ids)
        return _Held(tuple(reversed(past)), self.ids, skipped)


@dataclass(frozen=True, slots=True)
class _Guesses:
    """Of one place: what each context says, and the likeliest of it all with their probabilities."""

    contexts: list[dict[int, int]]  # token to bucket
    likely: list[tuple[int, float]]


def _by_probability(guess: tuple[int, float]) -> float:
    return guess[1]


class SuffixLookup(Lookup):
    """Finds the longest match of the committed ids in all texts so far, and everything that followed it.

    `limit` is the most tokens of text that are held, with about 100 bytes each for prose, 200 for random ids.
    When there are more, the newest half is kept: that takes some 3 microseconds a token, once in limit / 2
    tokens. What breaks off a call, as Ctrl-C does, leaves texts as they were before the call or as they
    would be after it; the next call makes the automaton again.
    """

    name = "suffix"

    def __init__(self, limit: int = 2**18) -> None:
        assert limit > 1
        self._limit = limit
        self._matches = Matches()
        self._forget()

    def _forget(self) -> None:
        self._whole = False  # while what follows from the texts is being changed
        self._held = _Held((), array("q"))
        self._build()
        self._settle()

    def _build(self) -> None:
        """Make everything that follows from the texts."""
        self._texts = SuffixAutomaton()
        self._tokens = self._held.tokens
        self._states = array("i", [ROOT])  # of the first 0, 1, 2, ... ids
        for passage in self._held.past:
            self._insert(passage)
        self._states.extend([ROOT] * self._held.skipped)
        self._go_on(self._held.ids[self._held.skipped :])

    def _settle(self) -> None:
        """End a change: keep to the limit, and find the place of the committed ids in the texts."""
        if self._tokens > self._limit:
            self._held = self._held.newest(self._limit // 2)
            self._build()
        state = self._texts.known(self._states[-1])
        self._place: TextState = (state, self._texts.length(state))
        self._seen: dict[TextState, _Guesses] = {}
        self._whole = True

    def _mend(self) -> None:
        """Bring to an end a change that was broken off."""
        if not self._whole:
            self._build()
            self._settle()

    def add_text(self, ids: Sequence[int]) -> None:
        """Have a text of earlier at hand, in ids of the same vocabulary: of a long one its last limit / 2."""
        self._mend()
        passage, held = _Passage(array("q", ids[-self._limit // 2 :])), self._held
        self._whole = False
        self._held = _Held((*held.past, passage), held.ids, held.skipped)
        self._insert(passage)
        self._tokens += len(passage.ids)
        self._settle()

    def fork(self) -> "SuffixLookup":
        """Its automaton is one of its own, over the texts that are shared."""
        lookup = SuffixLookup(self._limit)
        lookup._matches = copy.deepcopy(self._matches)
        lookup._held = _Held(self._held.past, array("q"))
        lookup._build()
        lookup._settle()
        return lookup

    def start(self, ids: Sequence[int]) -> None:
        self.rewind(len(ids))
        added = array("q", ids[len(self._held.ids) :])
        self._whole = False
        self._held.ids.extend(added)
        self._go_on(added)
        self._tokens += len(added)
        self._settle()

    def below(
        self, path: Sequence[int], noise: GumbelNoise | None, most: int, floor: float, max_depth: int
    ) -> Subtree:
        self._mend()
        place = self._place
        for token in path:
            place = self.walk(place, token)
        return grow_subtree(self, place, len(self._held.ids) + len(path), noise, most, floor, max_depth)

    def learn(self, tokens: Sequence[int]) -> None:
        self._mend()
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
        self._mend()
        held = self._held
        if length >= len(held.ids):
            return
        first = max(length - _WITHIN, held.skipped)
        passage = _Passage(held.ids[first:], max(length - first, 0))
        self._whole = False
        self._held = _Held((*held.past, passage), held.ids[:length], min(held.skipped, length))
        del self._states[length + 1 :]
        self._tokens += passage.lead
        self._settle()

    def close(self) -> None:
        self._forget()

    def walk(self, place: TextState, token: int) -> TextState:
        return self._texts.walk(*place, token)

    def guesses(self, place: TextState) -> Sequence[tuple[int, float]]:
        return self._at(place).likely

    def _at(self, place: TextState) -> _Guesses:
        seen = self._seen.get(place)
        if seen is None:
            seen = self._seen[place] = self._guess(*place)
        return seen

    def _guess(self, state: int, matched: int) -> _Guesses:
        """What the longest suffix and, for what none of its continuations gets, shorter ones say."""
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
        """The continuations that longer suffixes do not know: token to bucket."""
        total, ranked = self._texts.ranked(state)
        if len(ranked) <= len(known):  # those that a longer suffix knows, a shorter one knows as well
            return {}
        if known:
            total -= sum([count for token, count in ranked if token in known])
            ranked = [pair for pair in ranked if pair[0] not in known]
        longest = not known
        room = _GUESSES - len(known)
        return {token: bucket(matched, count, total, longest) for token, count in ranked[:room]}

    def _insert(self, passage: _Passage) -> None:
        state = ROOT
        for place, token in enumerate(passage.ids):
            state = self._texts.extend(state, token, counted=place >= passage.lead)

    def _go_on(self, ids: Sequence[int]) -> None:
        for token in ids:
            self._states.append(self._texts.extend(self._states[-1], token))
