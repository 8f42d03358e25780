"""Threads that fill slots for one consumer.

A slot is filled job by job (a job is one block of a file, or one copy to the device), several workers at a
time. Fillings under way are a round, which ends when a pass is broken off: workers begin nothing more in it.

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
from typing import Generic, NamedTuple, TypeVar

from offspec.core.errors import ClosedError
from offspec.core.trace import OFF, Timeline

Job = Callable[[int], int]  # (slot) -> bytes moved

_LOOK_AFTER_S = 1.0  # how often one who waits makes sure that there are workers left to wait for


class WorkerDiedError(RuntimeError):
    """A worker has ended that had something to fill, or none is left alive."""


class Worker(threading.Thread):
    """A thread that says itself, in a whole value, when it is at its end."""

    def __init__(self, name: str, work: Callable[["Worker"], None], tell: Callable[[], None]) -> None:
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


@dataclass(slots=True, eq=False)
class Filling:
    """A unit on its way into a slot: jobs still to start, and who works on the others. name: of the unit."""

    name: str
    slot: int
    waiting: list[Job]
    workers: list[Worker] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Whether no job is left. One that failed leaves its unit looking so, but an error in the round."""
        return not self.waiting and not self.workers

    @property
    def running(self) -> bool:
        return any(not worker.ended for worker in list(self.workers))

    @property
    def lost(self) -> bool:
        """Whether a thread ended while it held this."""
        return any(worker.ended for worker in list(self.workers))


@dataclass(slots=True)
class RingStats:
    """Counters since the threads were started; `wait_seconds` is how long the consumer stood waiting."""

    bytes_moved: int = 0
    wait_seconds: float = 0.0


class BytesMoved(NamedTuple):
    """Bytes of weights at one moment: streamed to what computes with them, and read from disk."""

    streamed: int = 0
    read: int = 0

    def since(self, before: "BytesMoved") -> "BytesMoved":
        """Bytes moved since an earlier moment."""
        return BytesMoved(self.streamed - before.streamed, self.read - before.read)


@dataclass(slots=True)
class Round:
    """What is under way, in order, and what kept it from ending well."""

    fillings: dict[int, Filling] = field(default_factory=dict)
    error: Exception | None = None
    stale: bool = False


R = TypeVar("R", bound=Round)


class WorkerPool(Generic[R]):
    """Threads that do the jobs of a round.

    Args:
        first: The round to begin with.
        workers: Threads.
        name: Worker i has the track "<name> <i>" in the timeline.
        more: Adds a filling to a round, called by one worker at a time when none waits in it; False where
            there is nothing to add. None: the consumer adds them.
        waits: The consumer's track, "compute" by default.
        timeline: Records jobs and waits.
    """

    def __init__(
        self,
        first: R,
        workers: int,
        name: str,
        more: Callable[[R], bool] | None = None,
        *,
        waits: str = "compute",
        timeline: Timeline = OFF,
    ) -> None:
        assert workers >= 1
        self.round = first
        self.stats = RingStats()
        self.closed = False
        self._name, self._more = name, more
        self._waits, self._timeline = waits, timeline
        self._process = os.getpid()
        self._taking = threading.Lock()  # among workers
        self._work_bell: SimpleQueue[None] = SimpleQueue()  # there may be something to fill
        self._done_bell: SimpleQueue[None] = SimpleQueue()  # a job has ended
        self._threads: list[Worker] = []
        try:
            for index in range(workers):
                self._threads.append(self._start(index))
        except BaseException:  # no more threads to be had, or Ctrl-C
            self.closed = True
            for _ in range(workers):
                self._work_bell.put(None)
            raise

    def _start(self, index: int) -> Worker:
        worker = Worker(f"{self._name} {index}", self._work, self._tell_done)
        worker.start()
        return worker

    def wait_for(self, wanted: Callable[[], Sequence[Filling | None]], name: str) -> None:
        """Until one of the fillings is whole; None stands for one that is yet to be added.

        Args:
            wanted: Gives the fillings, again and again.
            name: Of what is waited for.

        Raises:
            ClosedError: The pool was closed.
            WorkerDiedError: No worker will ever fill it; also whatever a worker raised.
        """
        if self._any_arrived(wanted()):
            return
        with self._timeline.span(self._waits, "wait", unit=name):
            asked = time.perf_counter()
            try:
                while not self._any_arrived(wanted()):
                    self._listen()
            finally:
                self.stats.wait_seconds += time.perf_counter() - asked

    def _any_arrived(self, fillings: Sequence[Filling | None]) -> bool:
        # A failed job leaves its unit looking filled, but only after the error is there: so a look at the
        # unit first, and at the error then, cannot miss it.
        whole = any(filling is not None and filling.whole for filling in fillings)
        if self.round.error is not None:
            raise self.round.error
        if whole:
            return True
        if self.closed:
            raise ClosedError("the engine was closed while a model was being streamed")
        lost = any(filling is not None and filling.lost for filling in fillings)
        if lost or all(worker.ended for worker in self._threads):
            raise WorkerDiedError(f"a {self._name} thread has ended")
        return False

    def _listen(self) -> None:
        """Wait until a job has ended, or for a while."""
        try:
            self._done_bell.get(timeout=_LOOK_AFTER_S)
        except Empty:
            return

    def stop_round(self) -> None:
        """Let the workers come to rest, with nothing more to begin."""
        old = self.round
        old.stale = True
        while any(filling.running for filling in list(old.fillings.values())):
            self._listen()

    def start_round(self, new: R) -> None:
        """Go on with another, after `stop_round`; workers that ended are replaced."""
        self.round = new
        if not self.closed:
            self._threads = [
                self._start(index) if worker.ended else worker for index, worker in enumerate(self._threads)
            ]
        self.ring_for_work()

    def ring_for_work(self) -> None:
        """Say that there may be something to fill."""
        for _ in range(len(self._threads) - self._work_bell.qsize()):
            self._work_bell.put(None)

    def close(self) -> None:
        """Stop the workers and wait for them. May be called twice."""
        self.closed = True
        if os.getpid() != self._process:
            return  # a child of a fork has this object, and none of its threads
        self.ring_for_work()
        self._tell_done()
        for worker in self._threads:
            while not worker.ended:
                self._listen()
            worker.join()

    def _tell_done(self) -> None:
        if self._done_bell.empty():  # one signal is enough; those that no thread awaits would pile up
            self._done_bell.put(None)

    def _take(self, worker: Worker) -> tuple[R, Filling, Job] | None:
        """The next job in order, or None when there is nothing to do now."""
        with self._taking:
            state = self.round
            while state.error is None and not state.stale:
                for filling in list(state.fillings.values()):
                    if not filling.waiting:
                        continue
                    # First on the list, then a look whether the round goes on: so either this worker sees
                    # that it is over, or the consumer that ends it sees this worker.
                    filling.workers.append(worker)
                    if state.stale:
                        filling.workers.remove(worker)
                        self._tell_done()
                        return None
                    return state, filling, filling.waiting.pop(0)
                if self._more is None or not self._more(state):
                    return None
        return None

    def _work(self, worker: Worker) -> None:
        while not self.closed:
            try:
                taken = self._take(worker)
            except (
                Exception
            ) as caught:  # making jobs failed: the caller must hear of it, and the thread go on
                self.round.error = caught
                self._tell_done()
                taken = None
            if taken is None:
                self._work_bell.get()
            else:
                self._run(worker, *taken)
        self._work_bell.put(None)  # for a worker that was not counted

    def _run(self, worker: Worker, state: R, filling: Filling, job: Job) -> None:
        moved, error = 0, None
        try:
            with self._timeline.span(worker.track, filling.name, slot=filling.slot) as span:
                moved = job(filling.slot)
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
