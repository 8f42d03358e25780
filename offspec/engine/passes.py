"""Passes of sequences: progress, breaking off, recovery, and the costs of each pass."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from offspec.core.errors import CapacityError, CheckpointError, StreamError
from offspec.core.events import Event
from offspec.core.trace import Timeline
from offspec.engine.batch import Batch
from offspec.engine.drafting import Drafting
from offspec.engine.sequence import Halted, PassSpent, RunningSequence
from offspec.engine.sequence_pass import PassResult
from offspec.model import device as devices
from offspec.model.contention import Contention
from offspec.plan.load import Assembly


class Passes:
    """Runs passes of an engine.

    Args:
        assembly: The loaded models.
        drafting: Learns what experts passes ask for.
        timeline: Records passes.
        contention: Looked at wherever a pass can be broken off.
    """

    def __init__(
        self, assembly: Assembly, drafting: Drafting, timeline: Timeline, contention: Contention
    ) -> None:
        self._assembly, self._drafting = assembly, drafting
        self._timeline, self._contention = timeline, contention
        self._ahead = False  # whether a draft takes a part of the processor beside the target

    def step(self, sequences: Sequence[RunningSequence]) -> list[list[Event]]:
        """Events of one more pass for each of the sequences, none of which has ended.

        The pass is broken off as soon as all of them are to be halted. A prompt may take several passes, of
        which all but the last bring no events. What fails one of several is its `error`.

        Raises:
            OffspecError: The pass failed; `held_back` then has the text that a sequence has not shown.
                Several of them may be tried again, one by one.
        """
        target = self._assembly.target
        before, asked = target.bytes_moved, self._experts()
        pending = sequences[0].state.pending

        def look() -> None:
            self._look(sequences)

        try:
            look()
            done = self._run(sequences, before.streamed, look)
        except Halted:
            return [sequence.halt() for sequence in sequences]
        after = self._experts()
        asked_now, moved = after[0] - asked[0], target.bytes_moved.since(before)
        spent = PassSpent(
            len(sequences),
            moved.streamed,
            moved.read,
            target.tree_model.spent,
            asked_now,
            asked_now - (after[1] - asked[1]),
        )
        if len(sequences) == 1 and isinstance(done[0], PassResult) and target.store is not None:
            rows = pending + len(done[0].grown.tree)
            if rows <= target.tree_model.chunk:  # else each chunk asks anew, as each sequence does
                self._drafting.learn_experts(rows, asked_now, spent.experts_read, asked[2])
        return [self._taken(sequence, found, spent) for sequence, found in zip(sequences, done, strict=True)]

    def _taken(
        self, sequence: RunningSequence, found: PassResult | Exception | None, spent: PassSpent
    ) -> list[Event]:
        try:
            if isinstance(found, Exception):
                raise found
            return [] if found is None else sequence.take(found, spent)
        except Exception as error:
            sequence.state.recover()
            sequence.error = self.user_error(error)
            if spent.sequences == 1:
                raise sequence.error from error
            return []

    def user_error(self, error: BaseException) -> BaseException:
        """The same error, or for one of torch's the one that names the fix."""
        if not devices.is_out_of_memory(error):
            return error
        return CapacityError(
            "memory ran out in the middle of a pass; give a smaller `context` or `budget`, or close what "
            "else uses memory",
            needed=0,
            given=self._assembly.vram or self._assembly.memory,
        )

    def _look(self, sequences: Sequence[RunningSequence]) -> None:
        """Called wherever a pass can be broken off. Raises Halted where all ask for that."""
        if not self._ahead:  # else it is no other process that this thread waits for
            self._contention.look()
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
                self._watched(sequences, streamed, look) as on_grown,
                self._timeline.span("engine", "pass") as span,
            ):
                room = self._drafting.room
                done = Batch(target, members, room, self._timeline, look, on_grown, self._note_ahead).run()
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
    def _watched(
        self, sequences: Sequence[RunningSequence], before: int, look: Callable[[], None]
    ) -> Iterator[Callable[[Sequence[int]], None]]:
        """Say how far the pass is, and look wherever it can be broken off; to be told the nodes of trees."""
        target, model, began = self._assembly.target, self._assembly.target.tree_model, time.perf_counter()
        nodes: Sequence[int] = [0] * len(sequences)

        def tell(layer: int) -> None:
            streamed, seconds = target.bytes_moved.streamed - before, time.perf_counter() - began
            for sequence, count in zip(sequences, nodes, strict=True):
                sequence.progressed(layer, count, streamed, seconds)

        def grown(counts: Sequence[int]) -> None:
            nonlocal nodes
            nodes = counts
            tell(0)

        try:
            tell(0)
            model.on_layer, model.between = tell, look
            for sequence in sequences:
                sequence.state.sources.watch(look)
            yield grown
        finally:
            model.on_layer = model.between = None
            for sequence in sequences:
                sequence.state.sources.watch(None)

    def _experts(self) -> tuple[int, int, int]:
        """Experts asked for and found in memory so far, and how many are there; where all are, nothing."""
        store = self._assembly.target.store
        return (0, 0, 0) if store is None else (store.stats.asked, store.stats.hits, len(store.kept))


def belongs_to_one(error: BaseException) -> bool:
    """Whether the error of a pass may be due to one of its sequences, and not to weights or the device."""
    shared = (CheckpointError, StreamError, torch.AcceleratorError)
    return isinstance(error, Exception) and not isinstance(error, shared)
