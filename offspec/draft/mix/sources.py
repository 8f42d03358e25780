"""All draft sources that an engine holds, whether or not a request uses them."""

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence

from offspec.draft.base import Drafter, Features, Lookup, RequiredStates, Scorer
from offspec.draft.mix.fault_tolerant import FaultTolerantDrafter, FaultTolerantLookup
from offspec.draft.mix.mixture import Mixture, Source, SourceStats
from offspec.model.cache import TreeCache
from offspec.sampling.format_rule import ConstraintRule
from offspec.sampling.noise import GumbelNoise


class Sources:
    """All draft sources of an engine, by name: drafters with weights or cache rows, and lookups.

    While an answer runs they are called through fault-tolerant wrappers, which never raise.
    """

    def __init__(
        self, drafters: Mapping[str, Drafter] | None = None, lookups: Mapping[str, Lookup] | None = None
    ) -> None:
        self.drafters, self.lookups = dict(drafters or {}), dict(lookups or {})
        self._advisory_drafters = {name: FaultTolerantDrafter(name, of) for name, of in self.drafters.items()}
        self._advisory_lookups = {name: FaultTolerantLookup(name, of) for name, of in self.lookups.items()}
        self._standing: dict[Hashable, SourceStats] = {}

    def fork(self, target: TreeCache) -> "Sources":
        """Return the sources for one more sequence, with shared weights and separate states.

        Statistics are shared by both. Close the fork before the original. target: the target's cache of that
        sequence.
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
    def required_states(self) -> RequiredStates:
        """States of the target's passes that any drafter requires."""
        every = [drafter.required_states for drafter in self.drafters.values()]
        layers = sorted({layer for wants in every for layer in wants.layers})
        return RequiredStates(any(wants.last for wants in every), tuple(layers))

    def mixture(
        self,
        names: Sequence[str],
        scorer: Callable[[str], Scorer],
        noise: GumbelNoise | None = None,
        case: Hashable = None,
        *,
        ends: frozenset[int] = frozenset(),
        format: ConstraintRule | None = None,
        notify: Callable[[str], None] = lambda text: None,
    ) -> Mixture:
        """Return the mixture of sources for one request.

        Args:
            names: Names of the sources.
            scorer: Makes the scorer of a drafter.
            noise: Sampling noise shared with the drafts.
            case: Key under which statistics are kept.
            ends: Tokens after which nothing is drafted.
            format: Constraint on the answer, if it has one.
            notify: Receives a message if a source is disabled.
        """
        drafters = [name for name in names if name in self.drafters]
        lookups = [name for name in names if name in self.lookups]
        key = (case, *drafters, *lookups)
        if key not in self._standing:
            self._standing[key] = SourceStats.of(len(drafters), len(lookups))
        for party in self._all():
            party.start_request(notify)
        sources = [Source(name, self._advisory_drafters[name], scorer(name)) for name in drafters]
        looked_up = [self._advisory_lookups[name] for name in lookups]
        return Mixture(sources, looked_up, noise, self._standing[key], ends, format)

    def set_cancel_check(self, look: Callable[[], None] | None) -> None:
        """Set a function to call during long steps; an exception it raises cancels the step."""
        for drafter in self.drafters.values():
            drafter.set_cancel_check(look)

    def adopt_target_cache(self) -> None:
        for drafter in self._advisory_drafters.values():
            drafter.adopt_target_cache()

    def observe(self, features: Features) -> None:
        """Pass the target states of committed positions to the sources that need them."""
        for drafter in self._advisory_drafters.values():
            if drafter.required_states:
                drafter.observe(features)

    def rewind(self, length: int) -> None:
        for party in self._all():
            party.rewind(length)

    def close(self) -> None:
        """Free the memory of all sources."""
        for party in self._all():
            party.close()

    def _all(self) -> list[FaultTolerantDrafter | FaultTolerantLookup]:
        return [*self._advisory_drafters.values(), *self._advisory_lookups.values()]
