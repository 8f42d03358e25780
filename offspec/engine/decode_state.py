"""Decoding states, lent to sequences: committed token ids and the caches that cover them."""

from collections.abc import Callable, Sequence

import numpy as np

from offspec.core.trace import OFF, Timeline
from offspec.draft.grow.tree_grower import CarriedTree
from offspec.draft.mix.sources import Sources
from offspec.engine.prefix_cache import PrefixCache, common_prefix_length
from offspec.model.cache import TreeCache
from offspec.model.loaded import LoadedModel
from offspec.plan.load import Assembly

_WORTH_COPYING = 16  # additional positions of a prompt in another sequence's cache
_WORTH_WAITING = 256  # positions of a prompt that another sequence is about to compute


class DecodeState:
    """Token ids of one sequence and the caches that cover them.

    The target's cache covers at most all `ids` but the last, which is the root of the next tree. Tokens of a
    new prompt that are not covered yet are part of the next pass.
    """

    def __init__(
        self,
        target: LoadedModel,
        sources: Sources | None = None,
        timeline: Timeline = OFF,
        prefixes: PrefixCache | None = None,
        cache: TreeCache | None = None,
    ) -> None:
        """Create a state without ids.

        Args:
            target: The model.
            sources: All draft sources; each follows the ids, whether or not a request uses it.
            timeline: Records cache swaps.
            prefixes: KV caches of other conversations on disk.
            cache: The target's cache for this sequence. None: the target's own.
        """
        self.target = target
        self.sources = sources or Sources()
        self.timeline = timeline
        self._prefixes = prefixes
        self._skip_prefix_cache = False  # whether to ignore the disk for the next prompt
        self.cache = cache or target.tree_model.cache
        self.ids: list[int] = []
        self.carried: CarriedTree | None = None  # nodes below the last id, while the draft has them

    @property
    def cached(self) -> int:
        """Committed positions in the target's KV cache."""
        return self.cache.length

    @property
    def pending(self) -> int:
        """Committed ids before the last that the target has not computed yet."""
        return len(self.ids) - 1 - self.cached

    def begin(self, prompt: Sequence[int], look: Callable[[], None] = lambda: None) -> int:
        """Make `prompt` the committed ids; return the length of its prefix that the caches keep.

        If the disk has a longer prefix than the target's cache, the cache is loaded from disk.

        Args:
            prompt: Token ids.
            look: Called meanwhile; it may raise.
        """
        held: Sequence[int] = self.ids[: self.cached]
        shared = _shared(held, prompt)
        if self._prefixes is not None and not self._skip_prefix_cache:
            self.sources.rewind(shared)  # caches on disk are of the target only
            with self.timeline.span("engine", "prefixes"):
                shared = _shared(self._prefixes.swap_in(self.cache, held, prompt, look), prompt)
        self._skip_prefix_cache, self.carried = False, None
        shared = self.cache.rewind(shared)
        self.sources.rewind(shared)
        self.ids = list(prompt)
        return shared

    def note_prefill(self, rows: int, seconds: float) -> None:
        """Record the duration of a pass with `rows` prompt tokens."""
        if self._prefixes is not None:
            self._prefixes.prefill.note(rows, seconds)

    def recover(self) -> None:
        """Drop rows that a cancelled pass has left after the committed positions."""
        self.carried = None
        self.cache.rewind(self.cached)

    def reusable_length(self, prompt: Sequence[int]) -> int:
        """Return the number of positions of the target's cache that a prompt can reuse."""
        return self.cache.reusable(_shared(self.ids[: self.cached], prompt))

    def common(self, prompt: Sequence[int]) -> int:
        """Return the length of the common prefix of the ids and a prompt, computed or not."""
        return _shared(self.ids, prompt)

    def take_over(self, other: "DecodeState", prompt: Sequence[int]) -> None:
        """Copy the prefix of a prompt from another sequence's target cache, before `begin`."""
        self.save_prefix()
        self.sources.rewind(_shared(self.ids[: self.cached], prompt))
        self.ids = []  # if the copy fails, a partial copy is useless
        self.ids = other.ids[: self.cache.copy_prefix(other.cache, other.reusable_length(prompt))]

    def forget(self) -> None:
        """Drop all cached positions, so that the next prompt is computed completely."""
        self.carried = None
        self.cache.rewind(0)
        self._skip_prefix_cache = True

    def close(self) -> None:
        """Free sources and cache, before the models are freed."""
        self.sources.close()
        self.cache.close()

    def save_prefix(self) -> None:
        """Write the target's cache to disk, if a prefix cache is configured."""
        if self._prefixes is not None:
            self._prefixes.save(self.cache, self.ids[: self.cached])


def _shared(held: Sequence[int], prompt: Sequence[int]) -> int:
    """Return the number of reusable positions for a prompt, whose last id is always computed."""
    return common_prefix_length(np.asarray(held, np.int32), np.asarray(prompt[:-1], np.int32))


class StatePool:
    """Pool of states for sequences; caches of idle states are reused as prefixes.

    Args:
        assembly: The loaded models, with the number of sequences that share passes.
        timeline: Records cache swaps.
        prefixes: KV caches of other conversations on disk.
    """

    def __init__(self, assembly: Assembly, timeline: Timeline, prefixes: PrefixCache | None) -> None:
        self.max_states = assembly.sequences
        self._assembly, self._timeline, self._prefixes = assembly, timeline, prefixes
        self.first = DecodeState(assembly.target, assembly.sources, timeline, prefixes)
        self._idle, self._busy = [self.first], list[DecodeState]()  # least recently used first

    @property
    def busy(self) -> bool:
        """Whether any state is in use."""
        return bool(self._busy)

    @property
    def _all(self) -> list[DecodeState]:
        return [*self._idle, *self._busy]

    def _make(self) -> DecodeState:
        cache = self.first.cache.empty_copy()
        sources = self._assembly.sources.fork(cache)
        return DecodeState(self._assembly.target, sources, self._timeline, self._prefixes, cache)

    def acquire(self, prompt: Sequence[int]) -> DecodeState | None:
        """Return a state for a prompt.

        An idle state is reused if the prompt shares most of its cached positions. Otherwise the prompt gets
        a new or the least recently used state, with a copy of the longest prefix that any state has.

        Returns:
            None if all states are busy, or a running sequence is about to compute the same prefix.

        Raises:
            Exception: Out of memory; existing states stay usable.
        """
        if len(self._busy) == self.max_states or any(_is_prefilling(state, prompt) for state in self._busy):
            return None
        found = max(self._idle, key=lambda state: state.reusable_length(prompt), default=None)
        if found is None or 2 * found.reusable_length(prompt) <= found.cached:
            found = self._longest_idle()
            source = max(self._all, key=lambda state: state.reusable_length(prompt))
            if source.reusable_length(prompt) - found.reusable_length(prompt) >= _WORTH_COPYING:
                found.take_over(source, prompt)
        self._idle.remove(found)
        self._busy.append(found)
        return found

    def _longest_idle(self) -> DecodeState:
        """Return an empty state if there is one or one can be made, else the least recently used."""
        for state in self._idle:
            if not state.cached:
                return state
        if len(self._all) < self.max_states:
            try:
                self._idle.insert(0, self._make())
            except Exception:  # probably out of memory: reuse an idle state instead
                if not self._idle:
                    raise
        return self._idle[0]

    def release(self, state: DecodeState) -> None:
        """Take back a state when its request has ended."""
        self._busy.remove(state)
        self._idle.append(state)

    def save_prefixes(self) -> None:
        """Write the caches of all states to disk, if a prefix cache is configured."""
        for state in self._all:
            state.save_prefix()

    def close(self) -> None:
        """Free all states, before the models are freed."""
        for state in self._all:
            state.close()


def _is_prefilling(state: DecodeState, prompt: Sequence[int]) -> bool:
    """Return whether a running sequence is about to compute a long prefix of a prompt."""
    return state.pending >= _WORTH_WAITING and state.common(prompt) - state.cached >= _WORTH_WAITING
