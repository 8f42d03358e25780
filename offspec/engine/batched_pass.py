"""One pass of the target over the trees of one or more sequences.

The bits of a row depend only on its own path, so sharing a pass changes no token of any sequence.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import torch

from offspec.core.trace import OFF, Timeline
from offspec.draft.grow.best_first import grow_forest
from offspec.draft.grow.tree_grower import TreeGrower
from offspec.engine.sequence_pass import PassResult, SequencePass
from offspec.model import runner
from offspec.model.loaded import LoadedModel
from offspec.model.runner import TreeModel, rows_at
from offspec.sampling.verify import Logits

_LOW_PRIORITY = 19  # nice value
_FLOOR = 4  # nodes guaranteed to each tree, even if those of other trees are likelier


class DraftAhead:
    """Extends one tree below its likeliest leaves in a thread while the target's pass is running.

    After verification, the nodes below the next root become the start of the next tree. This is worthwhile
    if the CPU is idle while weights are read: the draft uses half of the threads at a low priority.

    Args:
        growing: The tree; no other thread may use it meanwhile.
        target: The model whose pass is running. No draft step begins that would end after the pass.
    """

    def __init__(self, growing: TreeGrower, target: TreeModel) -> None:
        self.seconds = 0.0  # duration of drafting
        self._growing, self._target = growing, target
        self._before, self._layers = target.pass_time, len(target.skeleton.layers)
        self._over = threading.Event()
        self._set_up = threading.Event()
        self._error: Exception | None = None
        self._began = self._step = time.perf_counter()
        self._thread = threading.Thread(target=self._work, name="offspec draft", daemon=True)

    def __enter__(self) -> "DraftAhead":
        threads = torch.get_num_threads()
        try:
            self._thread.start()
            self._set_up.wait()
        except BaseException:
            self._end()
            raise
        finally:
            torch.set_num_threads(threads)  # a thread's setting is also inherited by all later threads
        return self

    def _end(self) -> None:
        """Wait until the thread has ended, even if Ctrl-C interrupts the wait."""
        self._over.set()
        try:
            if self._thread.ident is not None:
                self._thread.join()
        finally:
            if self._thread.ident is not None:
                self._thread.join()

    def __exit__(self, *raised: object) -> None:
        self._end()
        if self._error is not None:
            self._growing.report_error(self._error)

    def _work(self) -> None:
        try:
            torch.set_num_threads(max(torch.get_num_threads() // 2, 1))
        finally:
            self._set_up.set()
        with suppress(OSError, AttributeError):  # no priorities for single threads on this system
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)
        try:
            with torch.no_grad():
                self._growing.draft_ahead(self._should_continue)
        except Exception as error:  # the answer is unaffected: the nodes grown so far are valid
            self._error = error
        self.seconds = time.perf_counter() - self._began

    def _should_continue(self) -> bool:
        """Return whether the pass is likely to last longer than another draft step."""
        now = time.perf_counter()
        step, self._step = now - self._step, now
        if self._over.is_set():
            return False
        spent = self._target.pass_time
        done = 0 if spent is self._before else spent.layers
        return done == 0 or (now - self._began) * (self._layers - done) > step * done


class BatchedPass:
    """One pass of the target over the trees of several sequences.

    Args:
        target: The model.
        sequences: Sequences that share the pass.
        max_nodes: Maximum number of nodes of all trees together; each tree has a root in any case.
        timeline: Records the steps of the pass.
        look: Called between draft steps; an exception raised by it cancels the pass.
        on_grown: Called with the number of nodes of each tree once all are complete.
        on_ahead: Called with True when drafting during the pass begins to use CPU threads, and with False
            when it ends.
    """

    def __init__(
        self,
        target: LoadedModel,
        sequences: Sequence[SequencePass],
        max_nodes: int,
        timeline: Timeline = OFF,
        look: Callable[[], None] | None = None,
        on_grown: Callable[[Sequence[int]], None] = lambda nodes: None,
        on_ahead: Callable[[bool], None] = lambda begins: None,
    ) -> None:
        self._target, self._sequences, self._most = target, sequences, max_nodes
        self._timeline, self._look, self._on_grown, self._on_ahead = timeline, look, on_grown, on_ahead

    @torch.no_grad()
    def run(self) -> list[PassResult | Exception | None]:
        """Grow a tree for each sequence, run trees and pending tokens through the target, verify and commit.

        An exception means that the pass ended before any tree was walked: all ids are unchanged, and the
        target and all states must `recover`. A later failure affects one sequence: its ids are either
        unchanged or completely updated, and its state must `recover`.

        Returns:
            The result or the error of each sequence; None if its prompt needs another pass.
        """
        target, sequences, timeline = self._target, self._sequences, self._timeline
        began, fresh = time.perf_counter(), sequences[0].state.pending
        while len(sequences) == 1 and sequences[0].state.pending > runner.PASS_ROWS:
            self._prefill_chunk(sequences[0])
        self._divide_rows()
        with timeline.span("draft", "grow") as span:
            self._grow()
            span.note(
                nodes=sum(sequence.nodes for sequence in sequences),
                steps=sum(sequence.grown.steps for sequence in sequences if sequence.grown is not None),
            )
        self._on_grown([sequence.nodes for sequence in sequences])
        drafted = time.perf_counter()
        nodes = sum(sequence.nodes for sequence in sequences)
        with timeline.span("engine", "target", nodes=nodes), self._draft_ahead() as ahead:
            self._forward()
        self._walk()
        with timeline.span("engine", "commit"):
            for sequence in sequences:
                with sequence.isolate_errors():
                    sequence.commit()
        target.tree_model.pass_time.read()
        ended = time.perf_counter()
        if len(sequences) == 1:
            sequences[0].state.note_prefill(fresh, ended - began)
        hidden = 0.0 if ahead is None else ahead.seconds
        # With on-demand experts each row may wait for different weights, so no common wait is known.
        waited = target.tree_model.pass_time.waited if target.store is None else 0.0
        drafting, computing, members = drafted - began, ended - drafted, len(sequences)
        return [sequence.result(drafting, computing, waited, members, hidden) for sequence in sequences]

    def _divide_rows(self) -> None:
        """Divide the prompt rows of the pass among the sequences, the shortest remaining prompt first.

        So a short prompt does not wait for a long one. A single sequence gets all rows of the pass.
        """
        left = runner.SHARED_PROMPT_ROWS if len(self._sequences) > 1 else runner.PASS_ROWS
        for sequence in sorted(self._sequences, key=lambda sequence: sequence.state.pending):
            pending = sequence.state.pending
            sequence.prompt_rows = None if pending <= left else left
            left -= min(pending, left)

    def _grow(self) -> None:
        """Grow the trees of all sequences whose prompt is complete; the likeliest nodes get the budget."""
        sequences, branches = self._sequences, self._target.skeleton.branches
        growing = list[tuple[SequencePass, TreeGrower]]()
        for sequence in sequences:
            if sequence.prompt_rows is None:
                tree = sequence.begin_tree(self._look, alone=len(sequences) == 1)
                if isinstance(tree, TreeGrower):
                    growing.append((sequence, tree))
                else:
                    sequence.grown = tree
        trees, bare = [tree for _, tree in growing], len(sequences) - len(growing)
        found = grow_forest(trees, self._most, _FLOOR, bare, self._timeline)
        for (sequence, _), grown in zip(growing, found, strict=True):
            sequence.grown = grown
        if len(growing) == len(sequences) == 1 and branches:
            sequences[0].growing = growing[0][1]
        if not branches:
            for sequence in sequences:
                if sequence.grown is not None:
                    sequence.grown = sequence.grown.one_path(
                        drawn=sequence.decoding.acceptance_uniforms is not None
                    )

    def _forward(self) -> None:
        """Run pending tokens and trees of all sequences that have any through the target."""
        model = self._target.tree_model
        going = [sequence for sequence in self._sequences if sequence.prompt_rows != 0]
        rows = [sequence.rows() for sequence in going]
        model.aux_layers = self._sequences[0].state.sources.required_states.layers
        counts = [len(part.tokens) for part in rows]
        last = model.hidden_of(rows).split(counts)
        tapped = {layer: inputs.split(counts) for layer, inputs in model.aux_hidden_states.items()}
        for index, sequence in enumerate(going):
            sequence.last = last[index]
            sequence.tapped = {layer: inputs[index] for layer, inputs in tapped.items()}

    @contextmanager
    def _draft_ahead(self) -> Iterator[DraftAhead | None]:
        """Extend the only tree of the pass while the block runs, if its policy enables drafting ahead."""
        growing, sources = self._sequences[0].growing, self._sequences[0].state.sources
        if growing is None or not growing.can_draft_ahead:
            yield None
            return
        sources.set_cancel_check(
            None
        )  # the callback measures this thread and cancels work in this thread only
        self._on_ahead(True)
        try:
            with DraftAhead(growing, self._target.tree_model) as ahead:
                yield ahead
        finally:
            self._on_ahead(False)
            sources.set_cancel_check(self._look)

    def _walk(self) -> None:
        going = [sequence for sequence in self._sequences if sequence.last is not None]
        for sequence, logits in zip(going, self._logits(going), strict=True):
            if sequence.grown is not None:
                with sequence.isolate_errors():
                    sequence.walk_tree(logits)

    def _logits(self, sequences: Sequence[SequencePass]) -> list[Logits]:
        """Return the logits of each tree's nodes, and compute log-probabilities of prompts.

        If the output head is streamed at the end of every pass, the logits of all nodes are computed now;
        otherwise each row is computed when the walk needs it.
        """
        model = self._target.tree_model
        states = [last[-one.nodes or -1 :] for one in sequences if (last := one.last) is not None]
        scored = [rows for sequence in sequences if (rows := sequence.prompt_logprob_rows) is not None]
        if model.streams_head:
            every = model.logits(torch.cat(states), scored).split([len(nodes) for nodes in states])
            logits: list[Logits] = [partial(rows_at, rows) for rows in every]
        else:
            model.score(scored)
            logits = [model.logits_by_row(nodes) for nodes in states]
        for sequence in sequences:
            if sequence.prompt_scorer is not None:
                sequence.prompt_scorer.collect()
        return logits

    def _prefill_chunk(self, sequence: SequencePass) -> None:
        """Run a chunk of pending tokens through the target and commit it, in a separate pass."""
        sequence.prompt_rows = runner.PASS_ROWS
        with self._timeline.span("engine", "prompt", rows=runner.PASS_ROWS):
            self._forward()
            self._logits([sequence])
        sequence.commit()
        sequence.last, sequence.tapped = None, {}  # free them: they are as large as the pass
