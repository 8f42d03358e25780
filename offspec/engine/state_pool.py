"""States of decoding that an engine lends to sequences; their caches stay for later prompts."""

from collections.abc import Sequence

from offspec.core.trace import Timeline
from offspec.engine.decode import DecodeState
from offspec.engine.prefixes import Prefixes
from offspec.plan.load import Assembly

_WORTH_COPYING = 16  # positions that another sequence has more of a prompt
_WORTH_WAITING = 256  # positions that another sequence is about to read


class StatePool:
    """States that are lent to sequences; the cache of an idle one serves as a prefix.

    Args:
        assembly: The loaded models, with the number of sequences that share passes.
        timeline: Records what states do.
        prefixes: Other conversations, on disk.
    """

    def __init__(self, assembly: Assembly, timeline: Timeline, prefixes: Prefixes | None) -> None:
        self.most = assembly.sequences
        self._assembly, self._timeline, self._prefixes = assembly, timeline, prefixes
        self.first = DecodeState(assembly.target, assembly.sources, timeline, prefixes)
        self._idle, self._busy = [self.first], list[DecodeState]()  # the longest idle first

    @property
    def busy(self) -> bool:
        """Whether a sequence has a state."""
        return bool(self._busy)

    @property
    def _all(self) -> list[DecodeState]:
        return [*self._idle, *self._busy]

    def _make(self) -> DecodeState:
        """One more state, with a cache and draft sources of its own."""
        cache = self.first.cache.another()
        sources = self._assembly.sources.fork(cache)
        return DecodeState(self._assembly.target, sources, self._timeline, self._prefixes, cache)

    def take(self, prompt: Sequence[int]) -> DecodeState | None:
        """A state to answer a prompt with; None where all are busy, or another is about to read the same.

        Where it continues or repeats most of what an idle one holds, that is taken; else one that is new or
        was idle for longest, with a copy of what another holds of the prompt.

        Raises:
            Exception: Memory was refused; what is there stays usable.
        """
        if len(self._busy) == self.most or any(_awaited(state, prompt) for state in self._busy):
            return None
        found = max(self._idle, key=lambda state: state.shared(prompt), default=None)
        if found is None or 2 * found.shared(prompt) <= found.cached:
            found = self._longest_idle()
            source = max(self._all, key=lambda state: state.shared(prompt))
            if source.shared(prompt) - found.shared(prompt) >= _WORTH_COPYING:
                found.take_over(source, prompt)
        self._idle.remove(found)
        self._busy.append(found)
        return found

    def _longest_idle(self) -> DecodeState:
        """One that holds nothing, if there is or may be one."""
        for state in self._idle:
            if not state.cached:
                return state
        if len(self._all) < self.most:
            try:
                self._idle.insert(0, self._make())
            except Exception:  # memory was refused, perhaps: what an idle one holds is given up for it
                if not self._idle:
                    raise
        return self._idle[0]

    def give_back(self, state: DecodeState) -> None:
        """The request has ended."""
        self._busy.remove(state)
        self._idle.append(state)

    def keep(self) -> None:
        """Have what the caches hold on disk, where that is wanted."""
        for state in self._all:
            state.keep()

    def close(self) -> None:
        """Free what states hold, before the models are freed."""
        for state in self._all:
            state.close()


def _awaited(state: DecodeState, prompt: Sequence[int]) -> bool:
    """Whether a sequence is about to read much of a prompt."""
    return state.pending >= _WORTH_WAITING and state.common(prompt) - state.cached >= _WORTH_WAITING
