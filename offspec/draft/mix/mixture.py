"""The sources of guesses that one request uses together, and what is learnt of them as a company."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from offspec.draft.base import Children, Drafter, Lookup, Scorer
from offspec.draft.growing_tree import GrowingTree
from offspec.draft.mix.advisory import AdvisoryDrafter
from offspec.draft.mix.payoff import Backoff, OneRow, Payoff
from offspec.draft.mix.weights import Blended
from offspec.sampling.constraint import Format
from offspec.sampling.noise import GumbelNoise

_KEPT = 0.9  # of what passes gave and took, from one to the next

Seen = dict[int, tuple[Children, int]]  # candidate to its children, and their row


@dataclass(slots=True)
class Source:
    """A drafter and what reads its scores for one request."""

    name: str
    drafter: Drafter
    scorer: Scorer


@dataclass(slots=True)
class Standing:
    """What is learnt, from request to request, about sources that work together."""

    blend: Blended
    worth: tuple[Backoff, ...]
    tokens: float = 0.0  # a pass, and its seconds: running means
    seconds: float = 0.0
    payoff: Payoff = field(default_factory=Payoff)  # of all drafters
    found: Payoff = field(default_factory=lambda: Payoff(reads=False))  # of all lookups

    @classmethod
    def of(cls, drafters: int, lookups: int) -> "Standing":
        count = drafters + lookups
        return cls(Blended(count, drafters), tuple(Backoff() for _ in range(count)))


class Mixture:
    """The sources of one request: drafters, the main one first, then lookups; in this order they are counted.

    noise: what the guesses are coupled to, if they are. ends: tokens that end an answer, behind which nothing
    is drafted. format: what the answer must look like; tokens that it forces need no source. The main
    drafter's scorer has what plans go by.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        lookups: Sequence[Lookup] = (),
        noise: GumbelNoise | None = None,
        standing: Standing | None = None,
        ends: frozenset[int] = frozenset(),
        format: Format | None = None,
    ) -> None:
        assert sources or lookups or format
        self.sources, self.lookups, self.noise = tuple(sources), tuple(lookups), noise
        self.ends, self.format = ends, format
        self.names = (*(source.name for source in sources), *(lookup.name for lookup in lookups))
        self.standing = standing or Standing.of(len(sources), len(lookups))
        self._passes = 0

    @classmethod
    def single(cls, drafter: Drafter, scorer: Scorer) -> "Mixture":
        """One drafter by itself."""
        return cls([Source(drafter.name, drafter, scorer)])

    @property
    def main(self) -> Source | None:
        """The drafter that plans are made for; None where lookups are by themselves."""
        return self.sources[0] if self.sources else None

    @property
    def paused(self) -> bool:
        """Whether the drafters sit out the pass under way, or to come, since passes without are faster."""
        return bool(self.sources) and self.standing.payoff.rest > 0

    @property
    def blend(self) -> Blended:
        return self.standing.blend

    def active(self) -> tuple[int, ...]:
        """Which sources take part in the next pass."""
        standing, drafters = self.standing, len(self.sources)
        first = drafters if standing.payoff.rest else 0
        if first == drafters and standing.found.rest:
            return ()
        if len(self.names) == 1:
            return (0,)[first:]
        return tuple(
            index for index, worth in enumerate(standing.worth) if index >= first and not worth.rests
        )

    def start(self, ids: Sequence[int], active: Sequence[int], resumes: bool = False) -> None:
        """Have those that take part catch up with the committed ids.

        resumes: whether the main drafter has kept what it knows below the last of them.
        """
        for index in active:
            party = self._party(index)
            if resumes and isinstance(party, AdvisoryDrafter) and index == 0:
                party.resume(ids)
            else:
                party.start(ids)

    def _party(self, index: int) -> Drafter | Lookup:
        count = len(self.sources)
        return self.sources[index].drafter if index < count else self.lookups[index - count]

    def learn(self, grown: GrowingTree, nodes: Sequence[int], tokens: Sequence[int], asked: "Asked") -> None:
        """The target walked these candidates, the root first, and picked these tokens at them."""
        for index, lookup in enumerate(self.lookups, len(self.sources)):
            if index in asked.active:
                lookup.learn(tokens)
        if len(self.names) == 1:
            return
        for node, token in zip(nodes, tokens, strict=True):
            children = grown.children(node)
            if len(children) and not grown.settled[node]:
                hits = np.flatnonzero(grown.token[children] == token)
                self.blend.learn(grown.said[:, children], int(hits[0]) if len(hits) else None)

    def compare(self, asked: "Asked", tokens: int, seconds: float, one_row: OneRow | None) -> None:
        """Count a pass by whether drafters took part, which rest while passes without any are faster.

        Call before `settle`. The first pass of a request is not counted. one_row: what is known of a pass of
        one row; None where the pass cannot be compared with such.
        """
        if self._passes and self.sources:
            self.standing.payoff.observe(bool(asked.seen), tokens, seconds, one_row)

    def compare_lookups(
        self, asked: "Asked", rows: int, tokens: int, seconds: float, one_row: OneRow | None
    ) -> None:
        """The same of lookups where no costs bound what they find: they rest while one row is faster.

        Only passes without drafters tell, which else fill the tree. rows: nodes of the tree.
        """
        looked = any(index >= len(self.sources) for index in asked.active)
        if self._passes and self.lookups and not asked.seen:
            self.standing.found.observe(looked and rows > 1, tokens, seconds, one_row)

    def settle(
        self, asked: "Asked", guessed: NDArray[np.bool_], tokens: int, seconds: float, link: float | None
    ) -> None:
        """Count a pass: who guessed each accepted node, [S, n], and what it gave and took in all.

        A source that costs more than it brings is left out for a while. The first pass of a request is not
        counted: sources read the prompt then. link: seconds that a pass takes at least; None where no source
        is to be judged by itself.
        """
        self._passes += 1
        standing, active = self.standing, asked.active
        if link is None or len(self.names) == 1 or not active:
            return
        for index, worth in enumerate(standing.worth):
            if worth.rests and index not in active:
                worth.sit_out()
        if self._passes == 1:
            return
        keep = _KEPT if standing.seconds else 0.0
        standing.tokens = keep * standing.tokens + (1 - keep) * tokens
        standing.seconds = keep * standing.seconds + (1 - keep) * seconds
        for index in active:
            standing.worth[index].observe(asked.seconds.get(index, 0.0), _owed(guessed, index))
        losing = [
            worth
            for worth in (standing.worth[index] for index in active)
            if worth.loses(standing.tokens, standing.seconds, link)
        ]
        if losing and len(active) > 1:  # one at a time, since each is judged beside all others
            min(losing, key=lambda worth: (worth.gain, -worth.seconds)).drop()


@dataclass(slots=True)
class Asked:
    """Who took part in the growth of a tree, by index: seconds of each, and what drafters said of nodes."""

    active: tuple[int, ...] = ()
    seconds: dict[int, float] = field(default_factory=dict)
    seen: dict[int, Seen] = field(default_factory=dict)

    def spent(self, index: int, seconds: float) -> None:
        self.seconds[index] = self.seconds.get(index, 0.0) + seconds


def _owed(guessed: NDArray[np.bool_], index: int) -> float:
    """Accepted nodes [S, n] that would not have been, had this source been silent."""
    others = np.delete(guessed, index, axis=0).any(axis=0)
    alone = np.flatnonzero(~others)
    return float(guessed.shape[1] - alone[0]) if len(alone) else 0.0
