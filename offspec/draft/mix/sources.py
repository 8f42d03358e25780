"""All sources of guesses that an engine holds, whether or not a request uses them."""

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence

from offspec.draft.base import Drafter, Features, Lookup, Scorer, Wants
from offspec.draft.mix.advisory import AdvisoryDrafter, AdvisoryLookup
from offspec.draft.mix.mixture import Mixture, Source, Standing
from offspec.model.cache import TreeCache
from offspec.sampling.constraint import Format
from offspec.sampling.noise import GumbelNoise


class Sources:
    """Everything that drafts for an engine, by name: drafters with weights or rows, and lookups.

    What they are asked for while an answer runs goes through their advisory side, which never raises.
    """

    def __init__(
        self, drafters: Mapping[str, Drafter] | None = None, lookups: Mapping[str, Lookup] | None = None
    ) -> None:
        self.drafters, self.lookups = dict(drafters or {}), dict(lookups or {})
        self._advisory_drafters = {name: AdvisoryDrafter(name, of) for name, of in self.drafters.items()}
        self._advisory_lookups = {name: AdvisoryLookup(name, of) for name, of in self.lookups.items()}
        self._standing: dict[Hashable, Standing] = {}

    def fork(self, target: TreeCache) -> "Sources":
        """The same sources for one more sequence: weights are shared, and each has a state of its own.

        What was learnt so far is known to both. It is closed before this one. target: the target's cache of
        that sequence.
        """
        twin = Sources(
            {name: drafter.fork(target) for name, drafter in self.drafters.items()},
            {name: lookup.fork() for name, lookup in self.lookups.items()},
        )
        twin._standing = copy.deepcopy(self._standing)
        return twin

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.drafters, *self.lookups)

    @property
    def wants(self) -> Wants:
        """What all drafters together ask of the target's passes."""
        every = [drafter.wants for drafter in self.drafters.values()]
        layers = sorted({layer for wants in every for layer in wants.layers})
        return Wants(any(wants.last for wants in every), tuple(layers))

    def mixture(
        self,
        names: Sequence[str],
        scorer: Callable[[str], Scorer],
        noise: GumbelNoise | None = None,
        case: Hashable = None,
        *,
        ends: frozenset[int] = frozenset(),
        format: Format | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> Mixture:
        """These sources together, for one request.

        Args:
            names: Of the sources.
            scorer: Makes what reads a drafter's scores.
            noise: What guesses are coupled to.
            case: What they are seen at work at; what is learnt is kept for each.
            ends: Tokens behind which nothing is drafted.
            format: Of the answer, where it has one.
            tell: Hears of a source that had to be retired.
        """
        drafters = [name for name in names if name in self.drafters]
        lookups = [name for name in names if name in self.lookups]
        key = (case, *drafters, *lookups)
        if key not in self._standing:
            self._standing[key] = Standing.of(len(drafters), len(lookups))
        for party in self._all():
            party.begin(tell)
        sources = [Source(name, self._advisory_drafters[name], scorer(name)) for name in drafters]
        looked_up = [self._advisory_lookups[name] for name in lookups]
        return Mixture(sources, looked_up, noise, self._standing[key], ends, format)

    def watch(self, look: Callable[[], None] | None) -> None:
        """Have something called in the midst of long steps, which may raise to break them off."""
        for drafter in self.drafters.values():
            drafter.watch(look)

    def adopt(self) -> None:
        for drafter in self._advisory_drafters.values():
            drafter.adopt()

    def observe(self, features: Features) -> None:
        """Hand what a pass made of committed positions to the sources that read it."""
        for drafter in self._advisory_drafters.values():
            if drafter.wants:
                drafter.observe(features)

    def rewind(self, length: int) -> None:
        for party in self._all():
            party.rewind(length)

    def close(self) -> None:
        """Free what they hold."""
        for party in self._all():
            party.close()

    def _all(self) -> list[AdvisoryDrafter | AdvisoryLookup]:
        return [*self._advisory_drafters.values(), *self._advisory_lookups.values()]
