"""One pass of the target for the trees of several sequences, or of one.

A row's bits depend on its own path alone, so what shares a pass changes no token of another sequence.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from offspec.core.trace import OFF, Timeline
from offspec.draft.grow.best_first import grow_forest
from offspec.draft.grow.growing import Growing
from offspec.draft.grow.result import GrownTree
from offspec.draft.mix.payoff import OneRow
from offspec.engine.ahead import DraftAhead
from offspec.engine.decode import DecodeState, Decoding, PassStates
from offspec.model import runner
from offspec.model.loaded import LoadedModel
from offspec.model.runner import rows_at
from offspec.sampling.row_logprobs import PromptScorer, RowLogprobs
from offspec.sampling.verify import Logits, Walk

_FLOOR = 4  # nodes that each tree keeps, however likely those of others are


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
class Share:
    """A sequence's share of a pass.

    Args:
        state: Its token ids and caches.
        decoding: Its rules.
        max_depth: Most levels of its tree below the root.
        prompt_scorer: Gathers the log-probabilities of its prompt, where they are asked for.
        rows: Of its prompt, that go without a tree; None: all that is left, and a tree.
        grown, growing: Its tree, and the growth that goes on during the pass.
        states: Final hidden states of its rows.
        walk: Its accepted path.
        error: Why nothing came of it.
    """

    state: DecodeState
    decoding: Decoding
    max_depth: int
    prompt_scorer: PromptScorer | None = None
    rows: int | None = None
    grown: GrownTree | None = None
    growing: Growing | None = None
    states: PassStates | None = None
    walk: Walk | None = None
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
        wanted, states = self.prompt_scorer, self.states
        if wanted is None or states is None:
            return None
        return wanted.rows(self.state.cached, states.last)

    def commit(self) -> None:
        """Commit what came of it."""
        state, states = self.state, self.states
        if self.error is not None:
            return
        if states is not None and self.grown is not None and self.walk is not None:
            state.commit(self.grown, self.walk, self.decoding, states, self.growing)
        elif states is not None:
            state.commit_text(states)

    def result(
        self, drafted: float, computed: float, waited: float, members: int, hidden: float
    ) -> "PassResult | Exception | None":
        """Of a pass of so many seconds and members, by whose equal share sources are judged.

        waited: of the seconds computed, those for weights that any pass needs.
        """
        if self.error is not None or self.grown is None or self.walk is None:
            return self.error
        decoding, grown, seconds = self.decoding, self.grown, drafted + computed
        mixture, costs = decoding.mixture, decoding.growth.costs
        paused = mixture is not None and mixture.paused and self.max_depth > 0
        if mixture is not None:
            nodes, tokens = self.walk.nodes, len(self.walk.tokens)
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
        return PassResult(self.walk, grown, drafted, computed, hidden, paused)


class Batch:
    """One pass of the target for the trees of several sequences.

    Args:
        target: The model.
        shares: The sequences.
        most: Nodes of the trees of several together; each has its root whatever this is.
        timeline: Records what happens.
        look: Called between draft steps; what it raises cancels the pass.
        on_grown: Called with the number of nodes of each tree once all are complete.
        on_ahead: Called with True when the draft begins to take its part of the processor during the pass,
            and with False when it ends.
    """

    def __init__(
        self,
        target: LoadedModel,
        shares: Sequence[Share],
        most: int,
        timeline: Timeline = OFF,
        look: Callable[[], None] | None = None,
        on_grown: Callable[[Sequence[int]], None] = lambda nodes: None,
        on_ahead: Callable[[bool], None] = lambda begins: None,
    ) -> None:
        self._target, self._shares, self._most = target, shares, most
        self._timeline, self._look, self._on_grown, self._on_ahead = timeline, look, on_grown, on_ahead

    @torch.no_grad()
    def run(self) -> list[PassResult | Exception | None]:
        """Grow a tree for each sequence, take all through the target with pending tokens, walk them, commit.

        An exception ends the pass before any tree is walked: ids are what they were, and the target and all
        states must `recover`. What fails from there on fails one sequence, whose ids are what they were, or
        what they were to be, and whose state must `recover`.

        Returns:
            The result of each sequence, or why there is none; None where its prompt needs another pass.
        """
        target, shares, timeline = self._target, self._shares, self._timeline
        began, fresh = time.perf_counter(), shares[0].state.pending
        while len(shares) == 1 and shares[0].state.pending > runner.PASS_ROWS:
            self._read_ahead(shares[0])
        self._divide_rows()
        with timeline.span("draft", "grow") as span:
            self._grow()
            span.note(
                nodes=sum(share.nodes for share in shares),
                steps=sum(share.grown.steps for share in shares if share.grown is not None),
            )
        self._on_grown([share.nodes for share in shares])
        drafted = time.perf_counter()
        nodes = sum(share.nodes for share in shares)
        with timeline.span("engine", "target", nodes=nodes), self._foreseeing() as ahead:
            self._trip()
        self._walk()
        with timeline.span("engine", "commit"):
            for share in shares:
                with share.own():
                    share.commit()
        target.tree_model.spent.read()
        ended = time.perf_counter()
        if len(shares) == 1:
            shares[0].state.note_prefill(fresh, ended - began)
        hidden = 0.0 if ahead is None else ahead.seconds
        # Each row may wait for experts of its own.
        waited = target.tree_model.spent.waited if target.store is None else 0.0
        return [
            share.result(drafted - began, ended - drafted, waited, len(shares), hidden) for share in shares
        ]

    def _divide_rows(self) -> None:
        """Who reads how much of a prompt: who has least left goes first, and waits for no long one.

        A sequence by itself takes all that a pass may have.
        """
        left = runner.SHARED_PROMPT_ROWS if len(self._shares) > 1 else runner.PASS_ROWS
        for share in sorted(self._shares, key=lambda share: share.state.pending):
            pending = share.state.pending
            share.rows = None if pending <= left else left
            left -= min(pending, left)

    def _grow(self) -> None:
        """Grow the trees of all sequences that have one, the nodes going where tokens are likeliest."""
        shares, branches = self._shares, self._target.skeleton.branches
        growing = list[tuple[Share, Growing]]()
        for share in shares:
            if share.rows is None:
                alone = len(shares) == 1
                tree = share.state.begin_tree(share.decoding, share.max_depth, self._look, alone=alone)
                if isinstance(tree, Growing):
                    growing.append((share, tree))
                else:
                    share.grown = tree
        trees, bare = [tree for _, tree in growing], len(shares) - len(growing)
        found = grow_forest(trees, self._most, _FLOOR, bare, self._timeline)
        for (share, _), grown in zip(growing, found, strict=True):
            share.grown = grown
        if len(growing) == len(shares) == 1 and branches:
            shares[0].growing = growing[0][1]
        if not branches:
            for share in shares:
                if share.grown is not None:
                    share.grown = share.grown.one_path(drawn=share.decoding.numbers is not None)

    def _trip(self) -> None:
        """Take pending tokens and trees of all sequences that have some through the target."""
        model = self._target.tree_model
        going = [share for share in self._shares if share.rows != 0]
        rows = [share.state.rows(share.grown, share.rows) for share in going]
        model.taps = self._shares[0].state.sources.wants.layers
        counts = [len(part.tokens) for part in rows]
        last = model.hidden_of(rows).split(counts)
        tapped = {layer: inputs.split(counts) for layer, inputs in model.tapped.items()}
        for index, share in enumerate(going):
            share.states = PassStates(last[index], {layer: inputs[index] for layer, inputs in tapped.items()})

    @contextmanager
    def _foreseeing(self) -> Iterator[DraftAhead | None]:
        """Let the only tree of a pass grow on while the block runs, where its policy says so."""
        growing, sources = self._shares[0].growing, self._shares[0].state.sources
        if growing is None or not growing.foresees:
            yield None
            return
        sources.watch(None)  # what looks goes by the time of this thread, and breaks off what runs in it
        self._on_ahead(True)
        try:
            with DraftAhead(growing, self._target.tree_model) as ahead:
                yield ahead
        finally:
            self._on_ahead(False)
            sources.watch(self._look)

    def _walk(self) -> None:
        """Walk all trees."""
        going = [share for share in self._shares if share.states is not None]
        for share, logits in zip(going, self._logits(going), strict=True):
            if share.grown is not None:
                with share.own():
                    share.walk = share.state.walk(share.grown, share.decoding, logits)

    def _logits(self, shares: Sequence[Share]) -> list[Logits]:
        """Logits of each tree's nodes: of all now where the head streams, whose blocks end every pass.

        Log-probabilities of prompts are computed with them.
        """
        model = self._target.tree_model
        states = [share.states.last[-share.nodes or -1 :] for share in shares if share.states is not None]
        scored = [rows for share in shares if (rows := share.scored) is not None]
        if model.streams_head:
            every = model.logits(torch.cat(states), scored).split([len(nodes) for nodes in states])
            logits: list[Logits] = [partial(rows_at, rows) for rows in every]
        else:
            model.score(scored)
            logits = [model.logits_by_row(nodes) for nodes in states]
        for share in shares:
            if share.prompt_scorer is not None:
                share.prompt_scorer.take()
        return logits

    def _read_ahead(self, share: Share) -> None:
        """Take pending tokens through the target and commit them, in a pass of their own."""
        share.rows = runner.PASS_ROWS
        with self._timeline.span("engine", "prompt", rows=runner.PASS_ROWS):
            self._trip()
            self._logits([share])
        share.commit()
        share.states = None
