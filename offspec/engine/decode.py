"""The state of decoding: committed token ids, what both caches hold of them, and a pass over them."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from offspec.core.trace import OFF, Timeline
from offspec.draft.base import Features
from offspec.draft.grow.best_first import GrowthPolicy, grow
from offspec.draft.grow.result import GrownTree, root_alone
from offspec.draft.grow.static import grow_static
from offspec.draft.mix.mixture import Mixture
from offspec.draft.mix.sources import Sources
from offspec.model import runner
from offspec.model.attention import TreeContext
from offspec.model.loaded import LoadedModel
from offspec.model.runner import rows_at
from offspec.sampling.logits_processor import LogitsProcessor
from offspec.sampling.noise import GumbelNoise
from offspec.sampling.verify import LikelyRows, Walk, walk
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
        between: Called between draft steps, and may raise to cancel the pass.
        on_grown: Called with the number of nodes once the tree is complete.
        numbers: By Sequoia's rule, where the one drafter of the mixture samples: random numbers for the
            choice of the token at a position; trees then have a shape, or one node.
    """

    processor: LogitsProcessor
    noise: GumbelNoise | None
    mixture: Mixture | None
    growth: GrowthPolicy
    stop: Callable[[int], bool]
    shape: TreeShape | None = None
    between: Callable[[], None] | None = None
    on_grown: Callable[[int], None] | None = None
    numbers: Callable[[int], Iterator[float]] | None = None


@dataclass(frozen=True, slots=True)
class PassResult:
    """What a pass emitted, the tree it checked, and where its seconds went."""

    walk: Walk
    grown: GrownTree
    draft_seconds: float
    target_seconds: float


class DecodeState:
    """Token ids and the caches that follow them.

    The target's cache covers `ids` but for the last at most, the root of the next tree; tokens of a new
    prompt that it does not cover yet ride along with the next pass.
    """

    def __init__(self, target: LoadedModel, sources: Sources | None = None, timeline: Timeline = OFF) -> None:
        """sources: all that may guess, whether or not a request uses them: each follows the ids."""
        self._target = target
        self._sources = sources or Sources()
        self._timeline = timeline
        self.ids: list[int] = []

    @property
    def cached(self) -> int:
        """Committed positions whose keys and values the target holds."""
        return self._target.tree_model.cache.length

    def begin(self, prompt: Sequence[int]) -> int:
        """Make `prompt` the committed ids, keeping what the caches share with it; returns that length."""
        shared = 0
        limit = min(self.cached, len(self.ids), len(prompt) - 1)
        while shared < limit and self.ids[shared] == prompt[shared]:
            shared += 1
        shared = self._target.tree_model.cache.rewind(shared)
        self._sources.rewind(shared)
        self.ids = list(prompt)
        return shared

    @torch.no_grad()  # and not inference_mode, which an interrupt at its edge leaves on, with no way back
    def run_pass(self, decoding: Decoding, max_depth: int) -> PassResult:
        """Grow a tree, take it through the target with all pending tokens, walk it, commit the path.

        After an exception the committed ids are what they were; the target must then `recover`.
        """
        began = time.perf_counter()
        while len(self.ids) - 1 - self.cached > runner.PASS_ROWS:
            self._read_ahead(runner.PASS_ROWS)
        grown = self._grow(decoding, max_depth)
        if decoding.on_grown is not None:
            decoding.on_grown(len(grown.tree))
        drafted = time.perf_counter()
        with self._timeline.span("engine", "target", nodes=len(grown.tree)):
            hidden = self._forward(grown)
        model = self._target.tree_model
        root = len(self.ids) - 1
        pending = root - model.cache.length
        with self._timeline.span("verify", "walk") as span:
            logits = model.logits_by_row(hidden[pending:])
            rows = LikelyRows(grown.tree, logits, model.rows_together(self._target.device))
            result = _walk(grown, decoding, rows, root)
            span.note(emitted=len(result.tokens))
        with self._timeline.span("engine", "commit"):
            self._commit(grown, result, decoding, hidden)
        ended = time.perf_counter()
        costs = decoding.growth.costs
        if decoding.mixture is not None and costs is not None:  # who sets a budget wants what was named
            grown.settle(decoding.mixture, result.nodes, len(result.tokens), ended - began, costs.link)
        return PassResult(result, grown, drafted - began, ended - drafted)

    def _grow(self, decoding: Decoding, max_depth: int) -> GrownTree:
        mixture, policy, look = decoding.mixture, decoding.growth, decoding.between
        if mixture is None or policy.budget == 1 or max_depth < 1:
            return root_alone(self.ids[-1])
        with self._timeline.span("draft", "grow") as span:
            self._sources.adopt()
            if decoding.shape is None:
                grown = grow(mixture, self.ids, policy, max_depth, self._timeline, look)
            else:
                grown = grow_static(
                    mixture, self.ids, decoding.shape, max_depth, policy.width, self._timeline, look
                )
            if not self._target.skeleton.branches:
                grown = grown.one_path(drawn=decoding.numbers is not None)
            span.note(nodes=len(grown.tree), steps=grown.steps)
        return grown

    def _read_ahead(self, rows: int) -> None:
        """Take the first `rows` pending tokens through the target and commit them, in a pass of their own."""
        model, start = self._target.tree_model, self.cached
        place = torch.arange(start, start + rows, device=self._target.device)
        nothing = torch.zeros(0, 0, dtype=torch.bool, device=place.device)
        tokens = torch.tensor(self.ids[start : start + rows], device=place.device)
        model.taps = self._sources.wants.layers
        with self._timeline.span("engine", "prompt", rows=rows):
            hidden = model.hidden(tokens, TreeContext(start, place, rows, nothing))
            if model.streams_head:
                model.logits(hidden[-1:])  # which a pass asks for: its blocks come behind the layers
        model.cache.commit(rows, [])
        if self._sources.wants:
            self._sources.observe(Features(start, hidden, dict(model.tapped)))

    def _forward(self, grown: GrownTree) -> torch.Tensor:
        """Hidden states [P + N, H]: of the P pending tokens, which go in front, and of the tree's nodes."""
        model, device = self._target.tree_model, self._target.device
        root = len(self.ids) - 1
        pending = self.ids[model.cache.length : root]
        tree = grown.tree
        tokens, context = TreeContext.of_step(
            [*pending, *tree.token.tolist()],
            [*range(model.cache.length, root), *(root + tree.depth).tolist()],
            tree.ancestors(),
            prefix=model.cache.length,
            causal=len(pending),
            device=device,
        )
        model.taps = self._sources.wants.layers
        return model.hidden(tokens, context)

    def _commit(self, grown: GrownTree, result: Walk, decoding: Decoding, hidden: torch.Tensor) -> None:
        cache = self._target.tree_model.cache
        start = cache.length
        pending = len(self.ids) - 1 - start
        cache.commit(pending, result.nodes)
        self.ids.extend(result.tokens)
        decoding.processor.commit(result.tokens)
        mixture = decoding.mixture
        if mixture is not None and grown.asked.active:
            accepted = [int(grown.candidates[node]) for node in result.nodes]
            for index in grown.asked.seen:
                mixture.sources[index].drafter.commit(accepted)
            grown.learn(mixture, result.nodes, result.tokens)
        if self._sources.wants:
            rows = [*range(pending), *(pending + node for node in result.nodes)]
            tapped = self._target.tree_model.tapped
            inputs = {layer: rows_at(states, rows) for layer, states in tapped.items()}
            self._sources.observe(Features(start, rows_at(hidden, rows), inputs))

    def forget(self) -> None:
        """Compute the whole next prompt, whatever the caches hold of it."""
        self._target.tree_model.cache.rewind(0)


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
