"""One pass of the target for the trees of several sequences, or of one.

A row's bits depend on its own path alone, so what shares a pass changes no token of another sequence.
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
from offspec.draft.grow.growing import Growing
from offspec.engine.sequence_pass import PassResult, SequencePass
from offspec.model import runner
from offspec.model.loaded import LoadedModel
from offspec.model.runner import TreeModel, rows_at
from offspec.sampling.verify import Logits

_LOW_PRIORITY = 19  # nice's
_FLOOR = 4  # nodes that each tree keeps, however likely those of others are


class DraftAhead:
    """Grows one tree on below its likeliest leaves while the target's pass is on its way, in a thread.

    When the walk has ended, what was grown below the next root is where the next tree begins. It pays where
    the processor waits for weights: the draft takes what of it is idle, with half of the threads at a low
    priority.

    Args:
        growing: The tree, of which nobody else asks anything meanwhile.
        target: Whose pass is on its way: no step begins that would end behind it.
    """

    def __init__(self, growing: Growing, target: TreeModel) -> None:
        self.seconds = 0.0  # that it went on for
        self._growing, self._target = growing, target
        self._before, self._layers = target.spent, len(target.skeleton.layers)
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
            torch.set_num_threads(threads)  # the other thread's number is that of all threads to come as well
        return self

    def _end(self) -> None:
        """Wait until the thread has ended, also where Ctrl-C strikes meanwhile."""
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
            self._growing.failed(self._error)

    def _work(self) -> None:
        try:
            torch.set_num_threads(max(torch.get_num_threads() // 2, 1))
        finally:
            self._set_up.set()
        with suppress(OSError, AttributeError):  # where threads have no priority of their own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)
        try:
            with torch.no_grad():
                self._growing.foresee(self._goes_on)
        except Exception as error:  # it costs no answer: what was grown so far holds
            self._error = error
        self.seconds = time.perf_counter() - self._began

    def _goes_on(self) -> bool:
        """Whether the pass is likely to take longer than another step."""
        now = time.perf_counter()
        step, self._step = now - self._step, now
        if self._over.is_set():
            return False
        spent = self._target.spent
        done = 0 if spent is self._before else spent.layers
        return done == 0 or (now - self._began) * (self._layers - done) > step * done


class Batch:
    """One pass of the target for the trees of several sequences.

    Args:
        target: The model.
        sequences: Those that share the pass.
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
        sequences: Sequence[SequencePass],
        most: int,
        timeline: Timeline = OFF,
        look: Callable[[], None] | None = None,
        on_grown: Callable[[Sequence[int]], None] = lambda nodes: None,
        on_ahead: Callable[[bool], None] = lambda begins: None,
    ) -> None:
        self._target, self._sequences, self._most = target, sequences, most
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
        target, sequences, timeline = self._target, self._sequences, self._timeline
        began, fresh = time.perf_counter(), sequences[0].state.pending
        while len(sequences) == 1 and sequences[0].state.pending > runner.PASS_ROWS:
            self._read_ahead(sequences[0])
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
        with timeline.span("engine", "target", nodes=nodes), self._foreseeing() as ahead:
            self._trip()
        self._walk()
        with timeline.span("engine", "commit"):
            for sequence in sequences:
                with sequence.own():
                    sequence.commit()
        target.tree_model.spent.read()
        ended = time.perf_counter()
        if len(sequences) == 1:
            sequences[0].state.note_prefill(fresh, ended - began)
        hidden = 0.0 if ahead is None else ahead.seconds
        # Each row may wait for experts of its own.
        waited = target.tree_model.spent.waited if target.store is None else 0.0
        drafting, computing, members = drafted - began, ended - drafted, len(sequences)
        return [sequence.result(drafting, computing, waited, members, hidden) for sequence in sequences]

    def _divide_rows(self) -> None:
        """Who reads how much of a prompt: who has least left goes first, and waits for no long one.

        A sequence by itself takes all that a pass may have.
        """
        left = runner.SHARED_PROMPT_ROWS if len(self._sequences) > 1 else runner.PASS_ROWS
        for sequence in sorted(self._sequences, key=lambda sequence: sequence.state.pending):
            pending = sequence.state.pending
            sequence.prompt_rows = None if pending <= left else left
            left -= min(pending, left)

    def _grow(self) -> None:
        """Grow the trees of all sequences that have one, the nodes going where tokens are likeliest."""
        sequences, branches = self._sequences, self._target.skeleton.branches
        growing = list[tuple[SequencePass, Growing]]()
        for sequence in sequences:
            if sequence.prompt_rows is None:
                tree = sequence.begin_tree(self._look, alone=len(sequences) == 1)
                if isinstance(tree, Growing):
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
                    sequence.grown = sequence.grown.one_path(drawn=sequence.decoding.numbers is not None)

    def _trip(self) -> None:
        """Take pending tokens and trees of all sequences that have some through the target."""
        model = self._target.tree_model
        going = [sequence for sequence in self._sequences if sequence.prompt_rows != 0]
        rows = [sequence.rows() for sequence in going]
        model.taps = self._sequences[0].state.sources.wants.layers
        counts = [len(part.tokens) for part in rows]
        last = model.hidden_of(rows).split(counts)
        tapped = {layer: inputs.split(counts) for layer, inputs in model.tapped.items()}
        for index, sequence in enumerate(going):
            sequence.last = last[index]
            sequence.tapped = {layer: inputs[index] for layer, inputs in tapped.items()}

    @contextmanager
    def _foreseeing(self) -> Iterator[DraftAhead | None]:
        """Let the only tree of a pass grow on while the block runs, where its policy says so."""
        growing, sources = self._sequences[0].growing, self._sequences[0].state.sources
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
        going = [sequence for sequence in self._sequences if sequence.last is not None]
        for sequence, logits in zip(going, self._logits(going), strict=True):
            if sequence.grown is not None:
                with sequence.own():
                    sequence.walk_tree(logits)

    def _logits(self, sequences: Sequence[SequencePass]) -> list[Logits]:
        """Logits of each tree's nodes: of all now where the head streams, whose blocks end every pass.

        Log-probabilities of prompts are computed with them.
        """
        model = self._target.tree_model
        states = [last[-one.nodes or -1 :] for one in sequences if (last := one.last) is not None]
        scored = [rows for sequence in sequences if (rows := sequence.scored) is not None]
        if model.streams_head:
            every = model.logits(torch.cat(states), scored).split([len(nodes) for nodes in states])
            logits: list[Logits] = [partial(rows_at, rows) for rows in every]
        else:
            model.score(scored)
            logits = [model.logits_by_row(nodes) for nodes in states]
        for sequence in sequences:
            if sequence.prompt_scorer is not None:
                sequence.prompt_scorer.take()
        return logits

    def _read_ahead(self, sequence: SequencePass) -> None:
        """Take pending tokens through the target and commit them, in a pass of their own."""
        sequence.prompt_rows = runner.PASS_ROWS
        with self._timeline.span("engine", "prompt", rows=runner.PASS_ROWS):
            self._trip()
            self._logits([sequence])
        sequence.commit()
        sequence.last, sequence.tapped = None, {}  # they are as large as the pass
