"""The state of decoding one sequence: committed token ids, what the caches hold of them, and its trees."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from offspec.core.trace import OFF, Timeline
from offspec.draft.base import Features
from offspec.draft.grow.growing import Carried, Growing, GrowthPolicy
from offspec.draft.grow.result import GrownTree, root_alone
from offspec.draft.grow.static import grow_static
from offspec.draft.mix.advisory import AdvisoryDrafter
from offspec.draft.mix.mixture import Mixture
from offspec.draft.mix.sources import Sources
from offspec.engine.prefixes import Prefixes, common
from offspec.model.attention import TreeContext
from offspec.model.cache import TreeCache
from offspec.model.loaded import LoadedModel
from offspec.model.pass_parts import SequenceRows
from offspec.model.runner import rows_at
from offspec.sampling.logits_processor import LogitsProcessor
from offspec.sampling.noise import GumbelNoise
from offspec.sampling.verify import LikelyRows, Logits, Walk, walk
from offspec.sampling.verify_sequoia import walk_without_replacement
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


@dataclass(frozen=True, slots=True)
class PassStates:
    """What a pass made of a sequence's rows: final states [T, H], and inputs [T, H] of layers asked for."""

    last: torch.Tensor
    tapped: Mapping[int, torch.Tensor]


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
        self._target = target
        self.sources = sources or Sources()
        self._timeline = timeline
        self._prefixes = prefixes
        self._anew = False  # whether the next prompt is to be computed, whatever is on disk
        self.cache = cache or target.tree_model.cache
        self.ids: list[int] = []
        self._carried: Carried | None = None  # below the last id, while the draft holds it

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
            with self._timeline.span("engine", "prefixes"):
                shared = _shared(self._prefixes.change(self.cache, held, prompt, look), prompt)
        self._anew, self._carried = False, None
        shared = self.cache.rewind(shared)
        self.sources.rewind(shared)
        self.ids = list(prompt)
        return shared

    def begin_tree(
        self, decoding: Decoding, max_depth: int, look: Callable[[], None] | None, *, alone: bool = True
    ) -> Growing | GrownTree:
        """A tree below the last id that is to be grown, or one that is complete by itself.

        look: called between draft steps; what it raises cancels the growth. alone: whether no other sequence
        shares the pass, so that its rows are those of this prompt and this tree.
        """
        mixture, policy = decoding.mixture, decoding.next_growth
        if alone and self.pending:
            policy = policy.behind(self.pending)
        carried, self._carried = self._carried, None
        if mixture is None or policy.budget == 1 or max_depth < 1:
            return root_alone(self.ids[-1])
        self.sources.adopt()
        if decoding.shape is None:
            return Growing(mixture, self.ids, policy, max_depth, self._timeline, look, carried)
        if not mixture.active():
            return root_alone(self.ids[-1])
        return grow_static(mixture, self.ids, decoding.shape, max_depth, policy.width, self._timeline, look)

    def rows(self, grown: GrownTree | None, most: int | None = None) -> SequenceRows:
        """What a pass takes: at most `most` pending tokens, and behind all of them a tree if there is one."""
        start, root = self.cached, len(self.ids) - 1
        pending = self.ids[start:root][:most]
        end = start + len(pending)
        assert grown is None or end == root, "a tree stands behind all of the text"
        tree = None if grown is None else grown.tree
        tokens, context = TreeContext.of_step(
            pending if tree is None else [*pending, *tree.token.tolist()],
            [*range(start, end), *(() if tree is None else (root + tree.depth).tolist())],
            np.zeros((0, 0), np.bool_) if tree is None else tree.ancestors(),
            prefix=start,
            causal=len(pending),
            device=self._target.device,
        )
        return SequenceRows(tokens, context, self.cache)

    def walk(self, grown: GrownTree, decoding: Decoding, logits: Logits) -> Walk:
        """Walk a tree by the request's rule. logits: of some of its nodes, [n, V]."""
        with self._timeline.span("verify", "walk") as span:
            rows = LikelyRows(grown.tree, logits, self._target.tree_model.rows_together(self._target.device))
            result = _walk(grown, decoding, rows, len(self.ids) - 1)
            span.note(emitted=len(result.tokens))
        return result

    def commit_text(self, states: PassStates) -> None:
        """Commit the pending tokens that went through a pass without a tree."""
        start = self.cached
        self.cache.commit(len(states.last), [])
        if self.sources.wants:
            self.sources.observe(Features(start, states.last, states.tapped))

    def commit(
        self,
        grown: GrownTree,
        result: Walk,
        decoding: Decoding,
        states: PassStates,
        growing: Growing | None = None,
    ) -> None:
        """Commit all pending tokens and the path of a walk, of which the sources learn.

        growing: what the tree came from, if it was grown on: what is below the next root is kept.
        """
        start, pending = self.cached, self.pending
        self.cache.commit(pending, result.nodes)
        self.ids.extend(result.tokens)
        decoding.processor.commit(result.tokens)
        mixture = decoding.mixture
        if mixture is not None and grown.asked.active:
            accepted = [int(grown.candidates[node]) for node in result.nodes]
            self._carried = growing.carried(accepted[-1], result.tokens[-1]) if growing else None
            for index in grown.asked.seen:
                drafter = mixture.sources[index].drafter
                if self._carried is not None and isinstance(drafter, AdvisoryDrafter):
                    drafter.commit_with(accepted, self._carried.places)
                else:
                    drafter.commit(accepted)
            grown.learn(mixture, result.nodes, result.tokens)
        if self.sources.wants:
            rows = [*range(pending), *(pending + node for node in result.nodes)]
            inputs = {layer: rows_at(found, rows) for layer, found in states.tapped.items()}
            self.sources.observe(Features(start, rows_at(states.last, rows), inputs))

    def note_prefill(self, rows: int, seconds: float) -> None:
        """Learn what it takes to read a prompt: a pass with so many of its rows took so long."""
        if self._prefixes is not None:
            self._prefixes.prefill.note(rows, seconds)

    def recover(self) -> None:
        """Drop what a pass that was cancelled has left behind the committed positions."""
        self._carried = None
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
        self._carried = None
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


def _walk(grown: GrownTree, decoding: Decoding, rows: LikelyRows, position: int) -> Walk:
    """Walk a grown tree by the request's rule. rows, position: as in `walk`."""
    tree, processor, stop = grown.tree, decoding.processor, decoding.stop
    if decoding.numbers is None:
        return walk(tree, rows, processor, decoding.noise, position, stop)

    def drafts(node: int) -> torch.Tensor:
        children, row = grown.children[int(grown.candidates[node])]
        assert children.drawn is not None, "only guesses that were drawn can be tested so"
        return children.drawn[row]

    return walk_without_replacement(tree, rows, processor, drafts, decoding.numbers, position, stop)
