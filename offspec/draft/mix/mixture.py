"""The draft sources used together by one request, and the statistics about them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from offspec.draft.base import Children, Drafter, Lookup, Scorer
from offspec.draft.growing_tree import GrowingTree
from offspec.draft.mix.fault_tolerant import FaultTolerantDrafter
from offspec.draft.mix.payoff import Backoff, OneRowSeconds, Payoff
from offspec.draft.mix.weights import MixtureWeights
from offspec.sampling.format_rule import ConstraintRule
from offspec.sampling.noise import GumbelNoise

_KEPT = 0.9  # decay of the tokens and seconds of passes, from one to the next

Predictions = dict[int, tuple[Children, int]]  # row of its children by candidate


@dataclass(slots=True)
class Source:
    """A drafter and the scorer of its logits for one request."""

    name: str
    drafter: Drafter
    scorer: Scorer


@dataclass(slots=True)
class SourceStats:
    """Statistics about sources that work together, kept from request to request."""

    weights: MixtureWeights
    backoffs: tuple[Backoff, ...]
    tokens: float = 0.0  # per pass, with its seconds: running means
    seconds: float = 0.0
    payoff: Payoff = field(default_factory=Payoff)  # of all drafters
    lookup_payoff: Payoff = field(default_factory=lambda: Payoff(needs_catch_up=False))  # of all lookups

    @classmethod
    def of(cls, drafters: int, lookups: int) -> "SourceStats":
        count = drafters + lookups
        return cls(MixtureWeights(count, drafters), tuple(Backoff() for _ in range(count)))


class Mixture:
    """The sources of one request: drafters, the main one first, then lookups; indices follow this order.

    noise: the sampling noise shared with the drafts, if any. ends: tokens that end an answer, after which
    nothing is drafted. format: constraint on the answer; tokens that it forces need no source. The main
    drafter's scorer determines the calibration used by plans.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        lookups: Sequence[Lookup] = (),
        noise: GumbelNoise | None = None,
        standing: SourceStats | None = None,
        ends: frozenset[int] = frozenset(),
        format: ConstraintRule | None = None,
    ) -> None:
        assert sources or lookups or format
        self.sources, self.lookups, self.noise = tuple(sources), tuple(lookups), noise
        self.ends, self.format = ends, format
        self.names = (*(source.name for source in sources), *(lookup.name for lookup in lookups))
        self.stats = standing or SourceStats.of(len(sources), len(lookups))
        self._passes = 0

    @classmethod
    def single(cls, drafter: Drafter, scorer: Scorer) -> "Mixture":
        """Return a mixture of a single drafter."""
        return cls([Source(drafter.name, drafter, scorer)])

    @property
    def main(self) -> Source | None:
        """The drafter that plans are made for; None if there are only lookups."""
        return self.sources[0] if self.sources else None

    @property
    def paused(self) -> bool:
        """Whether the drafters skip the current or next pass, since passes without them are faster."""
        return bool(self.sources) and self.stats.payoff.paused_passes > 0

    @property
    def weights(self) -> MixtureWeights:
        return self.stats.weights

    def active(self) -> tuple[int, ...]:
        """Return the indices of the sources that take part in the next pass."""
        standing, drafters = self.stats, len(self.sources)
        first = drafters if standing.payoff.paused_passes else 0
        if first == drafters and standing.lookup_payoff.paused_passes:
            return ()
        if len(self.names) == 1:
            return (0,)[first:]
        return tuple(
            index for index, worth in enumerate(standing.backoffs) if index >= first and not worth.paused
        )

    def start(self, ids: Sequence[int], active: Sequence[int], resumes: bool = False) -> None:
        """Have the active sources catch up with the committed ids.

        resumes: whether the main drafter has kept its rows below the last of them.
        """
        for index in active:
            party = self._source(index)
            if resumes and isinstance(party, FaultTolerantDrafter) and index == 0:
                party.resume(ids)
            else:
                party.start(ids)

    def _source(self, index: int) -> Drafter | Lookup:
        count = len(self.sources)
        return self.sources[index].drafter if index < count else self.lookups[index - count]

    def learn(
        self, grown: GrowingTree, nodes: Sequence[int], tokens: Sequence[int], asked: "GrowthStats"
    ) -> None:
        """Learn from the candidates that the target walked, root first, and the tokens it picked at them."""
        for index, lookup in enumerate(self.lookups, len(self.sources)):
            if index in asked.active:
                lookup.learn(tokens)
        if len(self.names) == 1:
            return
        for node, token in zip(nodes, tokens, strict=True):
            children = grown.children(node)
            if len(children) and not grown.forced[node]:
                hits = np.flatnonzero(grown.token[children] == token)
                self.weights.learn(grown.source_log_probs[:, children], int(hits[0]) if len(hits) else None)

    def observe_drafting(
        self, asked: "GrowthStats", tokens: int, seconds: float, one_row: OneRowSeconds | None
    ) -> None:
        """Count a pass by whether drafters took part. Drafters are paused while passes without them are
        faster.

        Call before `end_pass`. The first pass of a request is not counted. one_row: bounds on the time of a
        one-row pass; None if the pass cannot be compared with one.
        """
        if self._passes and self.sources:
            self.stats.payoff.observe(bool(asked.predictions), tokens, seconds, one_row)

    def observe_lookups(
        self, asked: "GrowthStats", rows: int, tokens: int, seconds: float, one_row: OneRowSeconds | None
    ) -> None:
        """Count a pass for the lookups, if no costs limit their nodes: they are paused while one row is
        faster.

        Only passes without drafters count, since drafters fill the tree otherwise. rows: nodes of the tree.
        """
        looked = any(index >= len(self.sources) for index in asked.active)
        if self._passes and self.lookups and not asked.predictions:
            self.stats.lookup_payoff.observe(looked and rows > 1, tokens, seconds, one_row)

    def end_pass(
        self,
        asked: "GrowthStats",
        guessed: NDArray[np.bool_],
        tokens: int,
        seconds: float,
        link: float | None,
    ) -> None:
        """Count a pass: the sources that proposed each accepted node, [S, n], and the pass's total tokens and
        seconds.

        A source that costs more than it yields is paused for a while. The first pass of a request is not
        counted, since sources read the prompt in it. link: minimum seconds of a pass; None if sources are not
        evaluated separately.
        """
        self._passes += 1
        standing, active = self.stats, asked.active
        if link is None or len(self.names) == 1 or not active:
            return
        for index, worth in enumerate(standing.backoffs):
            if worth.paused and index not in active:
                worth.skip_pass()
        if self._passes == 1:
            return
        keep = _KEPT if standing.seconds else 0.0
        standing.tokens = keep * standing.tokens + (1 - keep) * tokens
        standing.seconds = keep * standing.seconds + (1 - keep) * seconds
        for index in active:
            standing.backoffs[index].observe(asked.seconds.get(index, 0.0), _tokens_due_to(guessed, index))
        losing = [
            worth
            for worth in (standing.backoffs[index] for index in active)
            if worth.should_pause(standing.tokens, standing.seconds, link)
        ]
        if losing and len(active) > 1:  # one at a time, since each is compared with all others
            min(losing, key=lambda worth: (worth.gain, -worth.seconds)).pause()


@dataclass(slots=True)
class GrowthStats:
    """Statistics of growing one tree, by source index: seconds of each source, and predictions of
    drafters.
    """

    active: tuple[int, ...] = ()
    seconds: dict[int, float] = field(default_factory=dict)
    predictions: dict[int, Predictions] = field(default_factory=dict)

    def spent(self, index: int, seconds: float) -> None:
        self.seconds[index] = self.seconds.get(index, 0.0) + seconds


def _tokens_due_to(guessed: NDArray[np.bool_], index: int) -> float:
    """Return the expected number of accepted nodes [S, n] that would be missing without this source."""
    others = np.delete(guessed, index, axis=0).any(axis=0)
    alone = np.flatnonzero(~others)
    return float(guessed.shape[1] - alone[0]) if len(alone) else 0.0
