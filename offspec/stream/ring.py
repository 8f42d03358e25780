"""Slots filled in a fixed cyclic order by worker threads, and emptied by one consumer.

Units (layers) are needed in the same order for ever, so the ring wraps from one pass into the next: while
the draft grows a tree, the first layers of the next pass are already being read. A slot is filled job by
job (a job is one block of a file, or one copy to the device), several workers at a time, and belongs to
the caller between `acquire` and `release`.

Ctrl-C strikes the consumer, at any instruction, also just after it has taken a lock. So the consumer takes
none: it writes whole values, rings bells that are queues, and never waits for more than a bell. Only the
workers, which no signal reaches, share a lock. Nor does it ask a thread whether it is alive, or join one
that is: interrupted in the midst of that, Python up to 3.12 marks a living thread as ended for good.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from offspec.core.errors import ClosedError
from offspec.core.trace import OFF, Timeline

Job = Callable[[int], int]  # (slot) -> bytes moved

_LOOK_AFTER_S = 1.0  # how often one who waits makes sure that there are workers left to wait for


class WorkerDiedError(RuntimeError):
    """No worker of a ring is left alive, so nothing will ever fill a slot."""


class _Worker(threading.Thread):
    """A thread that says itself, in a whole value, when it is at its end."""

    def __init__(self, name: str, work: Callable[["_Worker"], None], tell: Callable[[], None]) -> None:
        super().__init__(name=f"offspec-{name}", daemon=True)
        self.track = name
        self.ended = False
        self._does, self._tell = work, tell

    def run(self) -> None:
        try:
            self._does(self)
        finally:
            self.ended = True
            self._tell()


@dataclass(slots=True)
class _Filling:
    """A unit on its way into a slot: jobs still to start, and who works on the others."""

    unit: int
    waiting: list[Job]
    workers: list[_Worker] = field(default_factory=list)

    @property
    def running(self) -> bool:
        return any(not worker.ended for worker in list(self.workers))

    @property
    def lost(self) -> bool:
        """Whether a thread ended while it held this."""
        return any(worker.ended for worker in list(self.workers))


@dataclass(slots=True)
class RingStats:
    """Counters since the ring was made; `wait_seconds` is how long the consumer stood waiting."""

    bytes_moved: int = 0
    wait_seconds: float = 0.0


@dataclass(slots=True)
class _Round:
    """The ring's state between two restarts. Once it is stale, workers begin nothing more in it."""

    head: int  # the sequence number that `acquire` hands out next
    next_fill: int  # the next sequence number to be filled
    fillings: dict[int, _Filling] = field(default_factory=dict)
    error: Exception | None = None
    stale: bool = False


class Ring:
    """Cyclic slots over units, filled by worker threads.

    Sequence number s stands for unit s mod n in slot s mod `slots`. One thread consumes: it acquires units
    in cyclic order and releases each before the next. An error in a worker is raised by `acquire`.

    Args:
        names: One per unit, for the timeline.
        slots: How many.
        jobs_of: Lists what must be done to fill a slot with a unit.
        workers: Threads.
        name: Worker i has the track "<name> <i>" in the timeline.
        waits: The consumer's track, "compute" by default.
        timeline: Records jobs and waits.
    """

    def __init__(
        self,
        names: Sequence[str],
        slots: int,
        jobs_of: Callable[[int], list[Job]],
        *,
        workers: int,
        name: str,
        waits: str = "compute",
        timeline: Timeline = OFF,
    ) -> None:
        assert names and slots >= 1 and workers >= 1
        self.units, self.slots = len(names), slots
        self.stats = RingStats()
        self._names, self._name, self._jobs_of = tuple(names), name, jobs_of
        self._timeline, self._waits = timeline, waits
        self._round = _Round(0, 0)
        self._held = False
        self._closed = False
        self._process = os.getpid()
        self._taking = threading.Lock()  # among workers
        self._work_bell: SimpleQueue[None] = SimpleQueue()  # there may be something to fill
        self._done_bell: SimpleQueue[None] = SimpleQueue()  # a job has ended
        self._threads: list[_Worker] = []
        try:
            for index in range(workers):
                self._threads.append(self._start(index))
        except BaseException:  # no more threads to be had, or Ctrl-C
            self._closed = True
            for _ in range(workers):
                self._work_bell.put(None)
            raise

    def _start(self, index: int) -> _Worker:
        worker = _Worker(f"{self._name} {index}", self._work, self._tell_done)
        worker.start()
        return worker

    def acquire(self, unit: int) -> int:
        """The slot that holds `unit`, waiting for it if need be. Raises what a worker raised, ClosedError.

        Asking for another unit than the next in order (after a pass was broken off) restarts the ring.
        """
        assert not self._held, "release a unit before acquiring the next"
        if self._round.stale or self._round.head % self.units != unit:
            self._restart(unit)
        if not self._arrived():
            self._wait(unit)
        self._held = True
        return self._round.head % self.slots

    def _wait(self, unit: int) -> None:
        with self._timeline.span(self._waits, "wait", unit=self._names[unit]):
            asked = time.perf_counter()
            try:
                while not self._arrived():
                    self._listen()
            finally:
                self.stats.wait_seconds += time.perf_counter() - asked

    def _listen(self) -> None:
        """Wait until a job has ended, or for a while."""
        try:
            self._done_bell.get(timeout=_LOOK_AFTER_S)
        except Empty:
            return

    def _arrived(self) -> bool:
        """Whether the unit at the head is whole. Raises what keeps it from ever being so."""
        # A failed job leaves its unit looking filled, but only after the error is there: so a look at the
        # unit first, and at the error then, cannot miss it.
        filling = self._round.fillings.get(self._round.head)
        whole = filling is not None and not filling.waiting and not filling.workers
        if self._round.error is not None:
            raise self._round.error
        if whole:
            return True
        if self._closed:
            raise ClosedError("the engine was closed while a model was being streamed")
        if (filling is not None and filling.lost) or all(worker.ended for worker in self._threads):
            raise WorkerDiedError(f"a {self._name} thread has ended")
        return False

    def release(self) -> None:
        """Give the acquired slot back to be filled again."""
        assert self._held
        # In this order an interrupt between two of these leaves a slot that is still taken, never one that
        # is refilled while it is held.
        self._round.fillings.pop(self._round.head, None)
        self._round.head += 1
        self._held = False
        self._ring_for_work()

    def abandon(self) -> None:
        """After an error or an interrupt: forget what is held and what failed; the ring can be used again.

        It stands still until the next `acquire`, by which time what failed may have been mended.
        """
        self._held = False
        self._stop_round()

    def close(self) -> None:
        """Stop the workers and wait for them. May be called twice."""
        self._closed = True
        if os.getpid() != self._process:
            return  # a child of a fork has this object, and none of its threads
        self._ring_for_work()
        self._tell_done()
        for worker in self._threads:
            while not worker.ended:
                self._listen()
            worker.join()

    def _ring_for_work(self) -> None:
        for _ in range(len(self._threads) - self._work_bell.qsize()):
            self._work_bell.put(None)

    def _tell_done(self) -> None:
        if self._done_bell.empty():  # one signal is enough; those that no thread awaits would pile up
            self._done_bell.put(None)

    def _stop_round(self) -> None:
        """Let the workers come to rest, with nothing more to begin."""
        old = self._round
        old.stale = True
        while any(filling.running for filling in list(old.fillings.values())):
            self._listen()

    def _restart(self, unit: int) -> None:
        self._stop_round()
        self._round = _Round(unit, unit)
        if not self._closed:
            self._threads = [
                self._start(index) if worker.ended else worker for index, worker in enumerate(self._threads)
            ]
        self._ring_for_work()

    def _take(self, worker: _Worker) -> tuple[_Round, _Filling, Job, int] | None:
        """The next job in order, or None when there is nothing to do now."""
        with self._taking:
            state = self._round
            while state.error is None and not state.stale:
                for sequence in sorted(state.fillings.copy()):
                    filling = state.fillings.get(sequence)
                    if filling is None or not filling.waiting:
                        continue
                    # First on the list, then a look whether the round goes on: so either this worker sees
                    # that it is over, or the consumer that ends it sees this worker.
                    filling.workers.append(worker)
                    if state.stale:
                        filling.workers.remove(worker)
                        self._tell_done()
                        return None
                    return state, filling, filling.waiting.pop(0), sequence % self.slots
                if state.next_fill >= state.head + self.slots:
                    return None
                unit = state.next_fill % self.units
                state.fillings[state.next_fill] = _Filling(unit, self._jobs_of(unit))
                state.next_fill += 1
        return None

    def _work(self, worker: _Worker) -> None:
        while not self._closed:
            try:
                taken = self._take(worker)
            except Exception as caught:  # jobs_of failed: the caller must hear of it, and the thread go on
                self._round.error = caught
                self._tell_done()
                taken = None
            if taken is None:
                self._work_bell.get()
            else:
                self._run(worker, *taken)
        self._work_bell.put(None)  # for a worker that was not counted

    def _run(self, worker: _Worker, state: _Round, filling: _Filling, job: Job, slot: int) -> None:
        moved, error = 0, None
        try:
            with self._timeline.span(worker.track, self._names[filling.unit], slot=slot) as span:
                moved = job(slot)
                span.note(bytes=moved)
        except Exception as caught:  # every failure must reach the caller, none may end the thread
            error = caught
        except BaseException as caught:  # an exit asked for in a worker must not end the caller
            error = WorkerDiedError(f"a {self._name} thread was told to end: {caught!r}")
        with self._taking:
            self.stats.bytes_moved += moved
            if error is not None and state.error is None:
                state.error = error
            filling.workers.remove(worker)
        self._tell_done()
