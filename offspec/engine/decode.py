"""The state of decoding one sequence: committed token ids, what the caches hold of them, and its trees."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from offspec.core.trace import OFF, Timeline
from offspec.draft.grow.growing import Carried, GrowthPolicy
from offspec.draft.mix.mixture import Mixture
from offspec.draft.mix.sources import Sources
from offspec.engine.prefixes import Prefixes, common
from offspec.model.cache import TreeCache
from offspec.model.loaded import LoadedModel
from offspec.sampling.logits_processor import LogitsProcessor
from offspec.sampling.noise import GumbelNoise
from offspec_planners.sequoia import TreeShape


@dataclass(frozen=True, slots=True)
class Decoding:
    """What stays the same from pass to pass of one request.

    Args:
        processor: Penalties, temperature and filters.
        noise: Of the request; None at temperature 0.
        mixture: The draft sources; None without speculation.
        growth: How trees grow.
        stop: Called with each emitted token; True ends the answer.
        shape: Of all trees, where they are not grown best first; it has no more nodes than the budget of
            `growth`.
        record: How the next tree grows, if for the record as well; None where none ever does.
        rests: Whether drafters may rest while passes without any are faster.
        numbers: By Sequoia's rule, where the one drafter of the mixture samples: random numbers for the
            choice of the token at a position; trees then have a shape, or one node.
    """

    processor: LogitsProcessor
    noise: GumbelNoise | None
    mixture: Mixture | None
    growth: GrowthPolicy
    stop: Callable[[int], bool]
    shape: TreeShape | None = None
    record: Callable[[], GrowthPolicy | None] | None = None
    rests: bool = False
    numbers: Callable[[int], Iterator[float]] | None = None

    @property
    def next_growth(self) -> GrowthPolicy:
        """How the next tree grows."""
        return (self.record and self.record()) or self.growth


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
