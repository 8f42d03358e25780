"""Running of passes: progress reports, cancellation, recovery and usage figures."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from offspec.core.errors import CapacityError, CheckpointError, StreamError
from offspec.core.events import Event
from offspec.core.trace import Timeline
from offspec.engine.batched_pass import BatchedPass
from offspec.engine.drafting import Drafting
from offspec.engine.sequence import Halted, PassUsage, RunningSequence
from offspec.engine.sequence_pass import PassResult
from offspec.model import devices
from offspec.model.cpu_contention import CpuContention
from offspec.plan.load import Assembly


class PassRunner:
    """Runs passes of an engine.

    Args:
        assembly: The loaded models.
        drafting: Records the expert usage of passes.
        timeline: Records passes.
        contention: Polled wherever a pass can be cancelled.
    """

    def __init__(
        self, assembly: Assembly, drafting: Drafting, timeline: Timeline, contention: CpuContention
    ) -> None:
        self._assembly, self._drafting = assembly, drafting
        self._timeline, self._contention = timeline, contention
        self._ahead = False  # whether a draft is using CPU threads during the target's pass

    def step(self, sequences: Sequence[RunningSequence]) -> list[list[Event]]:
        """Run one pass for sequences that have not ended, and return the events of each.

        The pass is cancelled as soon as all sequences are halted. A prompt may take several passes; only the
        last yields events. The failure of one of several sequences is stored in its `error`.

        Raises:
            OffspecError: The pass failed; `flush_text` returns the held-back text of a sequence. If several
                sequences shared the pass, each may be tried again separately.
        """
        target = self._assembly.target
        before, asked = target.bytes_moved, self._experts()
        pending = sequences[0].state.pending

        def look() -> None:
            self._check_halted(sequences)

        try:
            look()
            done = self._run(sequences, before.streamed, look)
        except Halted:
            return [sequence.halt() for sequence in sequences]
        after = self._experts()
        asked_now, moved = after[0] - asked[0], target.bytes_moved.since(before)
        spent = PassUsage(
            len(sequences),
            moved.streamed,
            moved.read,
            target.tree_model.pass_time,
            asked_now,
            asked_now - (after[1] - asked[1]),
        )
        if len(sequences) == 1 and isinstance(done[0], PassResult) and target.store is not None:
            rows = pending + len(done[0].grown.tree)
            if rows <= target.tree_model.chunk:  # otherwise each chunk requests its experts separately
                self._drafting.learn_experts(rows, asked_now, spent.experts_read, asked[2])
        return [self._taken(sequence, found, spent) for sequence, found in zip(sequences, done, strict=True)]

    def _taken(
        self, sequence: RunningSequence, found: PassResult | Exception | None, spent: PassUsage
    ) -> list[Event]:
        try:
            if isinstance(found, Exception):
                raise found
            return [] if found is None else sequence.process_pass(found, spent)
        except Exception as error:
            sequence.state.recover()
            sequence.error = self.user_error(error)
            if spent.sequences == 1:
                raise sequence.error from error
            return []

    def user_error(self, error: BaseException) -> BaseException:
        """Return the error, or for out-of-memory errors of torch a CapacityError with a remedy."""
        if not devices.is_out_of_memory(error):
            return error
        return CapacityError(
            "out of memory during a pass; use a smaller `context` or `budget`, or close other programs",
            needed=0,
            given=self._assembly.vram or self._assembly.memory,
        )

    def _check_halted(self, sequences: Sequence[RunningSequence]) -> None:
        """Poll for cancellation. Raises Halted if all sequences are halted."""
        if not self._ahead:  # otherwise this thread may wait for our own draft, not for another process
            self._contention.poll()
        if all(sequence.halted for sequence in sequences):
            raise Halted

    def _note_ahead(self, begins: bool) -> None:
        self._ahead = begins
        self._contention.begin()

    def _run(
        self, sequences: Sequence[RunningSequence], streamed: int, look: Callable[[], None]
    ) -> list[PassResult | Exception | None]:
        target, members = self._assembly.target, [sequence.next_pass() for sequence in sequences]
        try:
            with (
                self._reporting_progress(sequences, streamed, look) as on_grown,
                self._timeline.span("engine", "pass") as span,
            ):
                room = self._drafting.max_nodes
                done = BatchedPass(
                    target, members, room, self._timeline, look, on_grown, self._note_ahead
                ).run()
                found = [one for one in done if isinstance(one, PassResult)]
                span.note(
                    nodes=sum(len(one.grown.tree) for one in found),
                    emitted=sum(len(one.walk.tokens) for one in found),
                )
            self._timeline.counter("bytes streamed", target.bytes_moved.streamed)
            return done
        except BaseException as error:
            target.recover()
            for sequence in sequences:
                sequence.state.recover()
            if (shown := self.user_error(error)) is not error:
                raise shown from error
            raise

    @contextmanager
    def _reporting_progress(
        self, sequences: Sequence[RunningSequence], before: int, look: Callable[[], None]
    ) -> Iterator[Callable[[Sequence[int]], None]]:
        """Report progress and call `look` wherever the pass can be cancelled.

        Yields a function that takes the number of nodes of each tree.
        """
        target, model, began = self._assembly.target, self._assembly.target.tree_model, time.perf_counter()
        nodes: Sequence[int] = [0] * len(sequences)

        def report(layer: int) -> None:
            streamed, seconds = target.bytes_moved.streamed - before, time.perf_counter() - began
            for sequence, count in zip(sequences, nodes, strict=True):
                sequence.on_progress(layer, count, streamed, seconds)

        def grown(counts: Sequence[int]) -> None:
            nonlocal nodes
            nodes = counts
            report(0)

        try:
            report(0)
            model.on_layer, model.check_cancelled = report, look
            for sequence in sequences:
                sequence.state.sources.set_cancel_check(look)
            yield grown
        finally:
            model.on_layer = model.check_cancelled = None
            for sequence in sequences:
                sequence.state.sources.set_cancel_check(None)

    def _experts(self) -> tuple[int, int, int]:
        """Return experts requested so far, found in memory so far, and in memory now.

        Zeros if all experts are resident.
        """
        store = self._assembly.target.store
        return (
            (0, 0, 0) if store is None else (store.stats.requested, store.stats.hits, len(store.cached_units))
        )


def is_sequence_error(error: BaseException) -> bool:
    """Return whether one sequence may have caused the error of a pass, not the weights or the device."""
    shared = (CheckpointError, StreamError, torch.AcceleratorError)
    return isinstance(error, Exception) and not isinstance(error, shared)
