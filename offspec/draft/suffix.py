"""Guesses from texts: what followed the last time the text was here.

Every earlier passage of the prompt, the output and, where there are some, other texts is at hand in a suffix
automaton. The longest suffix of the committed ids that went on before gives the first guesses, shorter ones
give what else might come, and each guess is followed on from there, so that a copied passage is guessed as
long as it lasts (SuffixDecoding: Oliaro et al. 2024, arXiv 2411.04975).
"""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from offspec.candidates import Twig
from offspec.draft.automaton import ROOT, SuffixAutomaton
from offspec.draft.matches import Matches, bucket
from offspec.draft.twigs import Place, grow_twig
from offspec.noise import GumbelNoise

_CONTEXTS = 2  # suffixes that are asked: the longest, and the next that knows more continuations
_GUESSES = 8  # most continuations of one place
_REST = 0.05  # probability that is not worth asking another context for
_WITHIN = 32  # tokens before the end of a text that is left, kept with what it went on with


@dataclass(frozen=True, slots=True)
class _Guesses:
    """Of one place: what each context says, and the likeliest of it all with their probabilities."""

    contexts: list[dict[int, int]]  # token to bucket
    likely: list[tuple[int, float]]


def _by_probability(guess: tuple[int, float]) -> float:
    return guess[1]


class SuffixLookup:
    """Finds the longest match of the committed ids in all texts so far, and everything that followed it.

    `limit` is the most tokens of text that are held, about 150 bytes each. When there are more, the newest
    half is kept: that takes some 3 microseconds a token, once in limit / 2 tokens.
    """

    name = "suffix"

    def __init__(self, limit: int = 2**18) -> None:
        assert limit > 1
        self._limit = limit
        self._matches = Matches()
        self._past: deque[array[int]] = deque()  # texts that are over, the oldest first
        self._ids = array("q")
        self._clear()

    def _clear(self) -> None:
        """Forget what the texts say, but not which there are."""
        self._texts = SuffixAutomaton()
        self._tokens = 0  # in the automaton
        self._states = array("i", [ROOT])  # of the first 0, 1, 2, ... ids
        self._place: Place = ROOT, 0
        self._seen: dict[Place, _Guesses] = {}

    def add_text(self, ids: Sequence[int]) -> None:
        """Have a text of earlier at hand, in ids of the same vocabulary: of a long one its last limit / 2."""
        text = array("q", ids[-self._limit // 2 :])
        self._past.append(text)
        self._insert(text)
        self._bound()
        self._look()

    def start(self, ids: Sequence[int]) -> None:
        """See `Lookup.start`."""
        self.rewind(len(ids))
        for token in ids[len(self._ids) :]:
            self._states.append(self._texts.extend(self._states[-1], token))
            self._ids.append(token)
            self._tokens += 1
        self._bound()
        self._look()

    def below(
        self, path: Sequence[int], noise: GumbelNoise | None, most: int, floor: float, max_depth: int
    ) -> Twig:
        """See `Lookup.below`."""
        place = self._place
        for token in path:
            place = self.walk(place, token)
        return grow_twig(self, place, len(self._ids) + len(path), noise, most, floor, max_depth)

    def learn(self, tokens: Sequence[int]) -> None:
        """See `Lookup.learn`."""
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
        """See `Lookup.rewind`."""
        if length >= len(self._ids):
            return
        self._past.append(self._ids[max(length - _WITHIN, 0) :])
        del self._ids[length:]
        del self._states[length + 1 :]
        self._look()

    def close(self) -> None:
        """See `Lookup.close`."""
        self._past.clear()
        del self._ids[:]
        self._clear()

    def walk(self, place: Place, token: int) -> Place:
        """See `Passages.walk`."""
        return self._texts.walk(*place, token)

    def guesses(self, place: Place) -> Sequence[tuple[int, float]]:
        """See `Passages.guesses`."""
        return self._at(place).likely

    def _look(self) -> None:
        """Find the place of the committed ids in the texts."""
        state = self._texts.known(self._states[-1])
        self._place = state, self._texts.length(state)
        self._seen.clear()

    def _at(self, place: Place) -> _Guesses:
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

    def _insert(self, text: Sequence[int]) -> None:
        state = ROOT
        for token in text:
            state = self._texts.extend(state, token)
        self._tokens += len(text)

    def _bound(self) -> None:
        """Build everything anew from the newest half of the texts when they have become too long."""
        if self._tokens <= self._limit:
            return
        kept = self._limit // 2
        skipped = max(len(self._ids) - kept, 0)
        room = kept - (len(self._ids) - skipped)
        texts: deque[array[int]] = deque()
        while self._past and room > 0:
            text = self._past.pop()[-room:]
            texts.appendleft(text)
            room -= len(text)
        self._past = texts
        self._clear()
        for text in texts:
            self._insert(text)
        self._states.extend([ROOT] * skipped)
        for token in self._ids[skipped:]:
            self._states.append(self._texts.extend(self._states[-1], token))
            self._tokens += 1
