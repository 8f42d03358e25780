"""One sequence in one pass: its tree, its rows, verification and commit."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from offspec.draft.base import Features
from offspec.draft.grow.result import GrownTree, root_only
from offspec.draft.grow.static import grow_static
from offspec.draft.grow.tree_grower import GrowthPolicy, TreeGrower
from offspec.draft.mix.fault_tolerant import FaultTolerantDrafter
from offspec.draft.mix.mixture import Mixture
from offspec.draft.mix.payoff import OneRowSeconds
from offspec.engine.decode_state import DecodeState
from offspec.model.attention import TreeContext
from offspec.model.pass_parts import SequenceRows
from offspec.model.runner import rows_at
from offspec.sampling.logits_processor import LogitsProcessor
from offspec.sampling.noise import GumbelNoise
from offspec.sampling.row_logprobs import PromptScorer, RowLogprobs
from offspec.sampling.verify import LazyLogits, Logits, VerifyResult, verify_tree
from offspec.sampling.verify_sequoia import verify_without_replacement
from offspec_planners.sequoia import TreeShape


@dataclass(frozen=True, slots=True)
class DecodingConfig:
    """Settings for all passes of a request.

    Args:
        processor: Penalties, temperature and filters.
        noise: Gumbel noise of the request; None at temperature 0.
        mixture: The draft sources; None without speculation.
        growth: Growth policy of trees.
        stop: Called with each emitted token; True ends the answer.
        shape: Fixed shape of all trees, with at most as many nodes as the budget of `growth`. None: trees are
            grown best first.
        record: Returns the growth policy of the next tree if that tree is recorded, else None. None: no tree
            is recorded.
        may_pause: Whether drafting may be paused while passes without it are faster.
        acceptance_uniforms: For Sequoia's rule, with one sampling drafter: returns the random numbers that
            decide the token at a position. Trees then have a fixed shape or a single node.
    """

    processor: LogitsProcessor
    noise: GumbelNoise | None
    mixture: Mixture | None
    growth: GrowthPolicy
    stop: Callable[[int], bool]
    shape: TreeShape | None = None
    record: Callable[[], GrowthPolicy | None] | None = None
    may_pause: bool = False
    acceptance_uniforms: Callable[[int], Iterator[float]] | None = None

    @property
    def next_growth(self) -> GrowthPolicy:
        """Growth policy of the next tree."""
        return (self.record and self.record()) or self.growth


@dataclass(frozen=True, slots=True)
class PassResult:
    """Result of a pass for one sequence.

    Args:
        walk: Result of verification, with the emitted tokens.
        grown: The verified tree.
        draft_seconds: Time of drafting before the target's pass.
        target_seconds: Time of the target's pass.
        hidden_seconds: Time of drafting during the target's pass.
        paused: As in `PassStats`.
    """

    walk: VerifyResult
    grown: GrownTree
    draft_seconds: float
    target_seconds: float
    hidden_seconds: float = 0.0
    paused: bool = False


@dataclass(slots=True)
class SequencePass:
    """One sequence in one pass.

    Args:
        state: Token ids and caches of the sequence.
        decoding: Settings of its request.
        max_depth: Maximum levels of the tree below the root.
        prompt_scorer: Collects the log-probabilities of the prompt, if the request includes them.
        prompt_rows: Number of prompt rows for a pass without a tree. None: all remaining rows, with a tree.
        grown: The tree.
        growing: Grower of the tree, if the tree is extended during the pass.
        last: Final hidden states [T, H] of the rows.
        tapped: Inputs [T, H] of the layers that draft sources require, by layer.
        walked: Result of verification.
        error: The error that made the pass fail for this sequence.
    """

    state: DecodeState
    decoding: DecodingConfig
    max_depth: int
    prompt_scorer: PromptScorer | None = None
    prompt_rows: int | None = None
    grown: GrownTree | None = None
    growing: TreeGrower | None = None
    last: torch.Tensor | None = None
    tapped: Mapping[int, torch.Tensor] = field(default_factory=dict)
    walked: VerifyResult | None = None
    error: Exception | None = None

    @contextmanager
    def isolate_errors(self) -> Iterator[None]:
        """Store an exception of the block as the error of this sequence only."""
        try:
            yield
        except Exception as error:
            self.error = error

    @property
    def nodes(self) -> int:
        return 0 if self.grown is None else len(self.grown.tree)

    @property
    def prompt_logprob_rows(self) -> RowLogprobs | None:
        """Rows of the pass that score prompt tokens; None if the request has no prompt log-probabilities."""
        if self.prompt_scorer is None or self.last is None:
            return None
        return self.prompt_scorer.rows(self.state.cached, self.last)

    def begin_tree(self, look: Callable[[], None] | None, *, alone: bool) -> TreeGrower | GrownTree:
        """Return a grower for the tree below the last id, or a tree that is already complete.

        Args:
            look: Called between draft steps; an exception raised by it cancels the growth.
            alone: Whether the pass has no other sequence, so its rows are only this prompt and this tree.
        """
        state, mixture, policy = self.state, self.decoding.mixture, self.decoding.next_growth
        if alone and state.pending:
            policy = policy.behind(state.pending)
        carried, state.carried = state.carried, None
        if mixture is None or policy.budget == 1 or self.max_depth < 1:
            return root_only(state.ids[-1])
        state.sources.adopt_target_cache()
        shape, depth = self.decoding.shape, self.max_depth
        if shape is None:
            return TreeGrower(mixture, state.ids, policy, depth, state.timeline, look, carried)
        if not mixture.active():
            return root_only(state.ids[-1])
        return grow_static(mixture, state.ids, shape, depth, policy.width, state.timeline, look)

    def rows(self) -> SequenceRows:
        """Return the input rows: up to `prompt_rows` pending tokens; the tree follows the last of them."""
        state, grown = self.state, self.grown
        start, root = state.cached, len(state.ids) - 1
        pending = state.ids[start:root][: self.prompt_rows]
        end = start + len(pending)
        assert grown is None or end == root, "a tree follows the whole text"
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
        """Verify the tree by the request's rule.

        Args:
            logits: Returns the logits [n, V] of some nodes.
        """
        state, grown, decoding = self.state, self.grown, self.decoding
        assert grown is not None
        tree, position = grown.tree, len(state.ids) - 1

        def drafts(node: int) -> torch.Tensor:
            children, row = grown.children[int(grown.candidates[node])]
            assert children.drawn_scores is not None, "this rule requires sampled draft tokens"
            return children.drawn_scores[row]

        with state.timeline.span("verify", "walk") as span:
            rows = LazyLogits(tree, logits, state.target.tree_model.rows_together(state.target.device))
            if decoding.acceptance_uniforms is None:
                walked = verify_tree(tree, rows, decoding.processor, decoding.noise, position, decoding.stop)
            else:
                walked = verify_without_replacement(
                    tree,
                    rows,
                    decoding.processor,
                    drafts,
                    decoding.acceptance_uniforms,
                    position,
                    decoding.stop,
                )
            span.note(emitted=len(walked.tokens))
        self.walked = walked

    def commit(self) -> None:
        """Commit the pending tokens of the pass and the accepted path, if there is a tree.

        Draft sources are updated with both.
        """
        state, sources, last = self.state, self.state.sources, self.last
        if self.error is not None or last is None:
            return
        start = state.cached
        if self.grown is None or self.walked is None:
            state.cache.commit(len(last), [])
            if sources.required_states:
                sources.observe(Features(start, last, self.tapped))
            return
        pending, nodes = state.pending, self.walked.nodes
        state.cache.commit(pending, nodes)
        state.ids.extend(self.walked.tokens)
        self.decoding.processor.commit(self.walked.tokens)
        self._update_drafters(self.grown, self.walked)
        if sources.required_states:
            rows = [*range(pending), *(pending + node for node in nodes)]
            inputs = {layer: rows_at(found, rows) for layer, found in self.tapped.items()}
            sources.observe(Features(start, rows_at(last, rows), inputs))

    def _update_drafters(self, grown: GrownTree, walked: VerifyResult) -> None:
        """Commit the accepted path in draft sources and update their statistics.

        Nodes below the next root are kept for the next tree.
        """
        mixture = self.decoding.mixture
        if mixture is None or not grown.growth_stats.active:
            return
        accepted = [int(grown.candidates[node]) for node in walked.nodes]
        carried = self.growing.carried(accepted[-1], walked.tokens[-1]) if self.growing else None
        self.state.carried = carried
        for index in grown.growth_stats.predictions:
            drafter = mixture.sources[index].drafter
            if carried is not None and isinstance(drafter, FaultTolerantDrafter):
                drafter.commit_and_keep(accepted, carried.places)
            else:
                drafter.commit(accepted)
        grown.learn(mixture, walked.nodes, walked.tokens)

    def result(
        self, drafted: float, computed: float, waited: float, members: int, hidden: float
    ) -> PassResult | Exception | None:
        """Update the statistics of draft sources; return the result, an error, or None without a tree.

        Args:
            drafted: Seconds of drafting before the target's pass.
            computed: Seconds of the target's pass.
            waited: Part of `computed` spent waiting for weights that any pass needs.
            members: Number of sequences in the pass; sources are charged an equal share of its time.
            hidden: Seconds of drafting during the target's pass.
        """
        if self.error is not None or self.grown is None or self.walked is None:
            return self.error
        decoding, grown, seconds = self.decoding, self.grown, drafted + computed
        mixture, costs = decoding.mixture, decoding.growth.costs
        paused = mixture is not None and mixture.paused and self.max_depth > 0
        if mixture is not None:
            nodes, tokens = self.walked.nodes, len(self.walked.tokens)
            one_row: OneRowSeconds | None = None
            if members == 1 and decoding.may_pause and not grown.recording:
                one_row = (
                    OneRowSeconds.predicted(float(costs.iteration(0.0, 1)))
                    if costs
                    else OneRowSeconds(waited, computed)
                )
            mixture.observe_drafting(grown.growth_stats, tokens, seconds, one_row)
            if costs is None:
                mixture.observe_lookups(grown.growth_stats, len(grown.tree), tokens, seconds, one_row)
            # With a budget set by the user, there are no costs: the named sources use all of it.
            link = None if costs is None else costs.link / members
            grown.end_pass(mixture, nodes, tokens, seconds / members, link)
        return PassResult(self.walked, grown, drafted, computed, hidden, paused)
