"""States of decoding, lent to sequences: committed token ids, and what the caches hold of them."""

from collections.abc import Callable, Sequence

import numpy as np

from offspec.core.trace import OFF, Timeline
from offspec.draft.grow.growing import Carried
from offspec.draft.mix.sources import Sources
from offspec.engine.prefixes import Prefixes, common
from offspec.model.cache import TreeCache
from offspec.model.loaded import LoadedModel
from offspec.plan.load import Assembly

_WORTH_COPYING = 16  # positions that another sequence has more of a prompt
_WORTH_WAITING = 256  # positions that another sequence is about to read


class DecodeState:
    """Token ids of one sequence and the caches that follow them.

    The target's cache covers `ids` but for the last at most, the root of the next tree; tokens of a new
    prompt that it does not cover yet ride along with the next pass.
    """

    def __init__(
        self,
        target: LoadedModel,
        sources: Sources | None = None,
        timeline: Timeline = OFF,
        prefixes: Prefixes | None = None,
        cache: TreeCache | None = None,
    ) -> None:
        """sources: all that may guess, whether or not a request uses them: each follows the ids.

        prefixes: other conversations, on disk. cache: of the target for this sequence, by default the
        target's own.
        """
        self.target = target
        self.sources = sources or Sources()
        self.timeline = timeline
        self._prefixes = prefixes
        self._anew = False  # whether the next prompt is to be computed, whatever is on disk
        self.cache = cache or target.tree_model.cache
        self.ids: list[int] = []
        self.carried: Carried | None = None  # below the last id, while the draft holds it

    @property
    def cached(self) -> int:
        """Committed positions whose keys and values the target holds."""
        return self.cache.length

    @property
    def pending(self) -> int:
        """Committed ids before the last that the target has not read."""
        return len(self.ids) - 1 - self.cached

    def begin(self, prompt: Sequence[int], look: Callable[[], None] = lambda: None) -> int:
        """Make `prompt` the committed ids, keeping what the caches share with it; returns that length.

        Where more of it is on disk than in the target's cache, that takes its place. look: called meanwhile;
        it may raise.
        """
        held: Sequence[int] = self.ids[: self.cached]
        shared = _shared(held, prompt)
        if self._prefixes is not None and not self._anew:
            self.sources.rewind(shared)  # of another conversation they have nothing, whatever the target has
            with self.timeline.span("engine", "prefixes"):
                shared = _shared(self._prefixes.change(self.cache, held, prompt, look), prompt)
        self._anew, self.carried = False, None
        shared = self.cache.rewind(shared)
        self.sources.rewind(shared)
        self.ids = list(prompt)
        return shared

    def note_prefill(self, rows: int, seconds: float) -> None:
        """Learn what it takes to read a prompt: a pass with so many of its rows took so long."""
        if self._prefixes is not None:
            self._prefixes.prefill.note(rows, seconds)

    def recover(self) -> None:
        """Drop what a pass that was cancelled has left behind the committed positions."""
        self.carried = None
        self.cache.rewind(self.cached)

    def shared(self, prompt: Sequence[int]) -> int:
        """Positions of the target's cache that serve a prompt."""
        return self.cache.reusable(_shared(self.ids[: self.cached], prompt))

    def common(self, prompt: Sequence[int]) -> int:
        """How many ids a prompt begins with alike, whether or not the target has read them."""
        return _shared(self.ids, prompt)

    def take_over(self, other: "DecodeState", prompt: Sequence[int]) -> None:
        """Hold what another sequence's cache of the target has of a prompt, before it is begun."""
        self.keep()
        self.sources.rewind(_shared(self.ids[: self.cached], prompt))
        self.ids = []  # where the copy fails, what is there of it serves nobody
        self.ids = other.ids[: self.cache.take_over(other.cache, other.shared(prompt))]

    def forget(self) -> None:
        """Compute the whole next prompt, whatever the caches hold of it."""
        self.carried = None
        self.cache.rewind(0)
        self._anew = True

    def close(self) -> None:
        """Free what it holds, before the models are freed."""
        self.sources.close()
        self.cache.close()

    def keep(self) -> None:
        """Have what the target's cache holds on disk, where that is wanted."""
        if self._prefixes is not None:
            self._prefixes.keep(self.cache, self.ids[: self.cached])


def _shared(held: Sequence[int], prompt: Sequence[int]) -> int:
    """Positions that serve a prompt, of whose ids the last is to be computed in any case."""
    return common(np.asarray(held, np.int32), np.asarray(prompt[:-1], np.int32))


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
