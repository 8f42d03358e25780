"""One sequence in one pass: its tree, its rows, the walk along the target's choices, and the commit."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from offspec.draft.base import Features
from offspec.draft.grow.growing import Growing, GrowthPolicy
from offspec.draft.grow.result import GrownTree, root_alone
from offspec.draft.grow.static import grow_static
from offspec.draft.mix.advisory import AdvisoryDrafter
from offspec.draft.mix.mixture import Mixture
from offspec.draft.mix.payoff import OneRow
from offspec.engine.decode import DecodeState
from offspec.model.attention import TreeContext
from offspec.model.pass_parts import SequenceRows
from offspec.model.runner import rows_at
from offspec.sampling.logits_processor import LogitsProcessor
from offspec.sampling.noise import GumbelNoise
from offspec.sampling.row_logprobs import PromptScorer, RowLogprobs
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
class PassResult:
    """What a pass emitted for a sequence, the tree it checked, and where the seconds of the pass went.

    hidden_seconds: of drafting beside the target. paused: as in `PassStats`.
    """

    walk: Walk
    grown: GrownTree
    draft_seconds: float
    target_seconds: float
    hidden_seconds: float = 0.0
    paused: bool = False


@dataclass(slots=True)
class SequencePass:
    """A sequence in a pass.

    Args:
        state: Its token ids and caches.
        decoding: Its rules.
        max_depth: Most levels of its tree below the root.
        prompt_scorer: Gathers the log-probabilities of its prompt, where they are asked for.
        prompt_rows: Of its prompt, that go without a tree; None: all that is left, and a tree.
        grown, growing: Its tree, and the growth that goes on during the pass.
        last: Final states [T, H] of its rows.
        tapped: Inputs [T, H] of layers that draft sources ask for.
        walked: Its accepted path.
        error: Why nothing came of it.
    """

    state: DecodeState
    decoding: Decoding
    max_depth: int
    prompt_scorer: PromptScorer | None = None
    prompt_rows: int | None = None
    grown: GrownTree | None = None
    growing: Growing | None = None
    last: torch.Tensor | None = None
    tapped: Mapping[int, torch.Tensor] = field(default_factory=dict)
    walked: Walk | None = None
    error: Exception | None = None

    @contextmanager
    def own(self) -> Iterator[None]:
        """What fails in this block fails this sequence alone."""
        try:
            yield
        except Exception as error:
            self.error = error

    @property
    def nodes(self) -> int:
        return 0 if self.grown is None else len(self.grown.tree)

    @property
    def scored(self) -> RowLogprobs | None:
        """Rows of the pass before tokens of a prompt whose log-probabilities are asked for."""
        if self.prompt_scorer is None or self.last is None:
            return None
        return self.prompt_scorer.rows(self.state.cached, self.last)

    def begin_tree(self, look: Callable[[], None] | None, *, alone: bool) -> Growing | GrownTree:
        """A tree below the last id that is to be grown, or one that is complete by itself.

        look: called between draft steps; what it raises cancels the growth. alone: whether no other sequence
        shares the pass, so that its rows are those of this prompt and this tree.
        """
        state, mixture, policy = self.state, self.decoding.mixture, self.decoding.next_growth
        if alone and state.pending:
            policy = policy.behind(state.pending)
        carried, state.carried = state.carried, None
        if mixture is None or policy.budget == 1 or self.max_depth < 1:
            return root_alone(state.ids[-1])
        state.sources.adopt()
        shape, depth = self.decoding.shape, self.max_depth
        if shape is None:
            return Growing(mixture, state.ids, policy, depth, state.timeline, look, carried)
        if not mixture.active():
            return root_alone(state.ids[-1])
        return grow_static(mixture, state.ids, shape, depth, policy.width, state.timeline, look)

    def rows(self) -> SequenceRows:
        """What a pass takes: at most `prompt_rows` pending tokens, and behind all of them the tree."""
        state, grown = self.state, self.grown
        start, root = state.cached, len(state.ids) - 1
        pending = state.ids[start:root][: self.prompt_rows]
        end = start + len(pending)
        assert grown is None or end == root, "a tree stands behind all of the text"
        tree = None if grown is None else grown.tree
        tokens, context = TreeContext.of_step(
            pending if tree is None else [*pending, *tree.token.tolist()],
            [*range(start, end), *(() if tree is None else (root + tree.depth).tolist())],
            np.zeros((0, 0), np.bool_) if tree is None else tree.ancestors(),
            prefix=start,
            causal=len(pending),
            device=state.target.device,
        )
        return SequenceRows(tokens, context, state.cache)

    def walk_tree(self, logits: Logits) -> None:
        """Walk the tree by the request's rule. logits: of some of its nodes, [n, V]."""
        state, grown, decoding = self.state, self.grown, self.decoding
        assert grown is not None
        tree, position = grown.tree, len(state.ids) - 1

        def drafts(node: int) -> torch.Tensor:
            children, row = grown.children[int(grown.candidates[node])]
            assert children.drawn is not None, "only guesses that were drawn can be tested so"
            return children.drawn[row]

        with state.timeline.span("verify", "walk") as span:
            rows = LikelyRows(tree, logits, state.target.tree_model.rows_together(state.target.device))
            if decoding.numbers is None:
                walked = walk(tree, rows, decoding.processor, decoding.noise, position, decoding.stop)
            else:
                walked = walk_without_replacement(
                    tree, rows, decoding.processor, drafts, decoding.numbers, position, decoding.stop
                )
            span.note(emitted=len(walked.tokens))
        self.walked = walked

    def commit(self) -> None:
        """Commit the pending tokens that went through the pass and the path of the walk, if there was one.

        Draft sources learn of both.
        """
        state, sources, last = self.state, self.state.sources, self.last
        if self.error is not None or last is None:
            return
        start = state.cached
        if self.grown is None or self.walked is None:
            state.cache.commit(len(last), [])
            if sources.wants:
                sources.observe(Features(start, last, self.tapped))
            return
        pending, nodes = state.pending, self.walked.nodes
        state.cache.commit(pending, nodes)
        state.ids.extend(self.walked.tokens)
        self.decoding.processor.commit(self.walked.tokens)
        self._teach(self.grown, self.walked)
        if sources.wants:
            rows = [*range(pending), *(pending + node for node in nodes)]
            inputs = {layer: rows_at(found, rows) for layer, found in self.tapped.items()}
            sources.observe(Features(start, rows_at(last, rows), inputs))

    def _teach(self, grown: GrownTree, walked: Walk) -> None:
        """Have draft sources follow the walk and learn from it; what is below the next root is kept."""
        mixture = self.decoding.mixture
        if mixture is None or not grown.asked.active:
            return
        accepted = [int(grown.candidates[node]) for node in walked.nodes]
        carried = self.growing.carried(accepted[-1], walked.tokens[-1]) if self.growing else None
        self.state.carried = carried
        for index in grown.asked.seen:
            drafter = mixture.sources[index].drafter
            if carried is not None and isinstance(drafter, AdvisoryDrafter):
                drafter.commit_with(accepted, carried.places)
            else:
                drafter.commit(accepted)
        grown.learn(mixture, walked.nodes, walked.tokens)

    def result(
        self, drafted: float, computed: float, waited: float, members: int, hidden: float
    ) -> PassResult | Exception | None:
        """Of a pass of so many seconds and members, by whose equal share sources are judged.

        waited: of the seconds computed, those for weights that any pass needs.
        """
        if self.error is not None or self.grown is None or self.walked is None:
            return self.error
        decoding, grown, seconds = self.decoding, self.grown, drafted + computed
        mixture, costs = decoding.mixture, decoding.growth.costs
        paused = mixture is not None and mixture.paused and self.max_depth > 0
        if mixture is not None:
            nodes, tokens = self.walked.nodes, len(self.walked.tokens)
            one_row: OneRow | None = None
            if members == 1 and decoding.rests and not grown.recording:
                one_row = (
                    OneRow.predicted(float(costs.iteration(0.0, 1))) if costs else OneRow(waited, computed)
                )
            mixture.compare(grown.asked, tokens, seconds, one_row)
            if costs is None:
                mixture.compare_lookups(grown.asked, len(grown.tree), tokens, seconds, one_row)
            # Who sets a budget wants what was named, and all of it.
            link = None if costs is None else costs.link / members
            grown.settle(mixture, nodes, tokens, seconds / members, link)
        return PassResult(self.walked, grown, drafted, computed, hidden, paused)
