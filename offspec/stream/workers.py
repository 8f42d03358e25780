"""Worker threads that fill slots for one consumer.

A slot is filled by jobs (a job is one block of a file, or one copy to the device), several workers at a time.
The reads in progress form a round. A round ends when a pass is cancelled; workers then start no more of its
jobs.

Ctrl-C can interrupt the consumer at any instruction, even just after it has acquired a lock. So the consumer
uses no locks: it replaces whole values, signals through queues, and only ever waits for a queue. Only the
workers, which receive no signals, share a lock. The consumer also never calls `is_alive` or joins a live
thread: if that is interrupted, Python up to 3.12 marks the live thread as ended for good.
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

_LOOK_AFTER_S = 1.0  # interval at which a waiting consumer checks that workers are still alive


class WorkerDiedError(RuntimeError):
    """A worker ended with unfinished work, or no worker is left alive."""


class Worker(threading.Thread):
    """Thread that sets `ended` itself when it ends."""

    def __init__(self, name: str, work: Callable[["Worker"], None], on_exit: Callable[[], None]) -> None:
        super().__init__(name=f"offspec-{name}", daemon=True)
        self.track = name
        self.ended = False
        self._does, self._on_exit = work, on_exit

    def run(self) -> None:
        try:
            self._does(self)
        finally:
            self.ended = True
            self._on_exit()


@dataclass(slots=True, eq=False)
class SlotRead:
    """Read of a unit into a slot.

    name: name of the unit. waiting: jobs that have not started. workers: workers that run the other jobs.
    """

    name: str
    slot: int
    waiting: list[Job]
    workers: list[Worker] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether no job is left. This also holds after a failed job, whose error is in the round."""
        return not self.waiting and not self.workers

    @property
    def running(self) -> bool:
        return any(not worker.ended for worker in list(self.workers))

    @property
    def is_abandoned(self) -> bool:
        """Whether a thread ended during one of the jobs."""
        return any(worker.ended for worker in list(self.workers))


@dataclass(slots=True)
class RingStats:
    """Counters since the threads were started; `wait_seconds` is the time that the consumer waited."""

    bytes_moved: int = 0
    wait_seconds: float = 0.0


class BytesMoved(NamedTuple):
    """Bytes of weights moved so far: streamed to the computing device, and read from disk."""

    streamed: int = 0
    read: int = 0

    def since(self, before: "BytesMoved") -> "BytesMoved":
        """Return the bytes moved since an earlier count."""
        return BytesMoved(self.streamed - before.streamed, self.read - before.read)


@dataclass(slots=True)
class ReadRound:
    """Reads in progress, in order, and the error that ended the round."""

    reads: dict[int, SlotRead] = field(default_factory=dict)
    error: Exception | None = None
    stale: bool = False


R = TypeVar("R", bound=ReadRound)


class WorkerPool(Generic[R]):
    """Threads that run the jobs of a round.

    Args:
        first: First round.
        workers: Number of threads.
        name: Worker i has the track "<name> <i>" in the timeline.
        more: Adds a read to a round that has no waiting jobs, and returns False if there is nothing to add.
            Called by one worker at a time. None if the consumer adds the reads.
        waits: Track of the consumer, "compute" by default.
        timeline: Timeline of jobs and waits.
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
        self._work_signal: SimpleQueue[None] = SimpleQueue()  # there may be work
        self._done_signal: SimpleQueue[None] = SimpleQueue()  # a job has ended
        self._threads: list[Worker] = []
        try:
            for index in range(workers):
                self._threads.append(self._start(index))
        except BaseException:  # no more threads available, or Ctrl-C
            self.closed = True
            for _ in range(workers):
                self._work_signal.put(None)
            raise

    def _start(self, index: int) -> Worker:
        worker = Worker(f"{self._name} {index}", self._work, self._notify_done)
        worker.start()
        return worker

    def wait_for(self, wanted: Callable[[], Sequence[SlotRead | None]], name: str) -> None:
        """Wait until one of the reads is complete.

        Errors of workers are raised here.

        Args:
            wanted: Returns the reads, with None for a read that is not yet added. Called repeatedly.
            name: Name of the unit, for the timeline.

        Raises:
            ClosedError: The pool was closed.
            WorkerDiedError: No worker is left to finish the read.
        """
        if self._any_arrived(wanted()):
            return
        with self._timeline.span(self._waits, "wait", unit=name):
            asked = time.perf_counter()
            try:
                while not self._any_arrived(wanted()):
                    self._await_signal()
            finally:
                self.stats.wait_seconds += time.perf_counter() - asked

    def _any_arrived(self, slot_reads: Sequence[SlotRead | None]) -> bool:
        # After a failed job its unit looks complete, but the error is stored before that. So checking the
        # unit first and the error second cannot miss it.
        whole = any(slot_read is not None and slot_read.is_complete for slot_read in slot_reads)
        if self.round.error is not None:
            raise self.round.error
        if whole:
            return True
        if self.closed:
            raise ClosedError("the engine was closed while a model was being streamed")
        lost = any(slot_read is not None and slot_read.is_abandoned for slot_read in slot_reads)
        if lost or all(worker.ended for worker in self._threads):
            raise WorkerDiedError(f"a {self._name} thread has ended")
        return False

    def _await_signal(self) -> None:
        """Wait until a job has ended, or until a timeout."""
        try:
            self._done_signal.get(timeout=_LOOK_AFTER_S)
        except Empty:
            return

    def stop_round(self) -> None:
        """End the round, and wait until its running jobs have ended."""
        old = self.round
        old.stale = True
        while any(slot_read.running for slot_read in list(old.reads.values())):
            self._await_signal()

    def start_round(self, new: R) -> None:
        """Start another round after `stop_round`, replacing workers that ended."""
        self.round = new
        if not self.closed:
            self._threads = [
                self._start(index) if worker.ended else worker for index, worker in enumerate(self._threads)
            ]
        self.notify_work()

    def notify_work(self) -> None:
        """Wake the workers because there may be work."""
        for _ in range(len(self._threads) - self._work_signal.qsize()):
            self._work_signal.put(None)

    def close(self) -> None:
        """Stop the workers and wait for them. May be called twice."""
        self.closed = True
        if os.getpid() != self._process:
            return  # a forked child process has this object but not its threads
        self.notify_work()
        self._notify_done()
        for worker in self._threads:
            while not worker.ended:
                self._await_signal()
            worker.join()

    def _notify_done(self) -> None:
        if self._done_signal.empty():  # one is enough, and unread signals would pile up
            self._done_signal.put(None)

    def _take(self, worker: Worker) -> tuple[R, SlotRead, Job] | None:
        """Return the next job in order, or None if there is none."""
        with self._taking:
            state = self.round
            while state.error is None and not state.stale:
                for slot_read in list(state.reads.values()):
                    if not slot_read.waiting:
                        continue
                    # Join the list before checking for the end of the round: then either this worker sees
                    # that the round has ended, or the consumer that ends it sees this worker.
                    slot_read.workers.append(worker)
                    if state.stale:
                        slot_read.workers.remove(worker)
                        self._notify_done()
                        return None
                    return state, slot_read, slot_read.waiting.pop(0)
                if self._more is None or not self._more(state):
                    return None
        return None

    def _work(self, worker: Worker) -> None:
        while not self.closed:
            try:
                taken = self._take(worker)
            except Exception as caught:  # creating jobs failed: report it to the caller, keep the thread
                self.round.error = caught
                self._notify_done()
                taken = None
            if taken is None:
                self._work_signal.get()
            else:
                self._run(worker, *taken)
        self._work_signal.put(None)  # for a worker that was not counted

    def _run(self, worker: Worker, state: R, slot_read: SlotRead, job: Job) -> None:
        moved, error = 0, None
        try:
            with self._timeline.span(worker.track, slot_read.name, slot=slot_read.slot) as span:
                moved = job(slot_read.slot)
                span.note(bytes=moved)
        except Exception as caught:  # every failure must reach the caller without ending the thread
            error = caught
        except BaseException as caught:  # an exit raised in a worker must not end the caller
            error = WorkerDiedError(f"a {self._name} thread was ended by {caught!r}")
        with self._taking:
            self.stats.bytes_moved += moved
            if error is not None and state.error is None:
                state.error = error
            slot_read.workers.remove(worker)
        self._notify_done()
