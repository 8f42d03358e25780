"""Slots filled in a fixed cyclic order by worker threads, and emptied by one consumer.

Units (layers) are needed in the same order for ever, so the ring wraps from one pass into the next: while
the draft grows a tree, the first layers of the next pass are already being read. A slot is filled job by
job (a job is one block of a file, or one copy to the device), several workers at a time, and belongs to
the caller between `acquire` and `release`.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from offspec.errors import ClosedError
from offspec.timeline import OFF, Timeline

Job = Callable[[int], int]  # (slot) -> bytes moved

_LOOK_AFTER_S = 1.0  # how often a waiting consumer makes sure that there are workers left to wait for


class WorkerDiedError(RuntimeError):
    """No worker of a ring is left alive, so nothing will ever fill a slot."""


@dataclass(slots=True)
class _Filling:
    """A unit on its way into a slot: jobs still to start, and who works on the others."""

    unit: int
    waiting: list[Job]
    workers: list[threading.Thread] = field(default_factory=list)

    @property
    def running(self) -> bool:
        return any(worker.is_alive() for worker in self.workers)


@dataclass(slots=True)
class RingStats:
    """Counters since the ring was made; `wait_seconds` is how long the consumer stood waiting."""

    bytes_moved: int = 0
    wait_seconds: float = 0.0


@dataclass(slots=True)
class _State:
    head: int = 0  # the sequence number that `acquire` hands out next
    next_fill: int = 0  # the next sequence number to be filled
    held: int | None = None
    fillings: dict[int, _Filling] = field(default_factory=dict)
    error: Exception | None = None
    paused: bool = False
    stale: bool = False  # a restart was begun and not finished
    closed: bool = False


class Ring:
    """Cyclic slots over units; `jobs_of(unit)` lists what must be done to fill a slot with it.

    Sequence number s stands for unit s mod n in slot s mod `slots`. One thread consumes: it acquires units
    in cyclic order and releases each before the next. An error in a worker surfaces in `acquire`. names:
    one per unit, for the timeline, where worker i has a track "<name> <i>".
    """

    def __init__(
        self,
        names: Sequence[str],
        slots: int,
        jobs_of: Callable[[int], list[Job]],
        *,
        workers: int,
        name: str,
        timeline: Timeline = OFF,
    ) -> None:
        assert names and slots >= 1 and workers >= 1
        self.units, self.slots = len(names), slots
        self.stats = RingStats()
        self._names, self._name, self._jobs_of, self._timeline = tuple(names), name, jobs_of, timeline
        self._state = _State()
        self._changed = threading.Condition()
        self._threads = [self._start(index) for index in range(workers)]

    def _start(self, index: int) -> threading.Thread:
        name = f"{self._name} {index}"
        thread = threading.Thread(target=self._work, args=(name,), name=f"offspec-{name}", daemon=True)
        thread.start()
        return thread

    def acquire(self, unit: int) -> int:
        """The slot that holds `unit`, waiting for it if need be. Raises what a worker raised, ClosedError.

        Asking for another unit than the next in order (after a pass was broken off) starts the ring anew.
        """
        with self._changed:
            state = self._state
            assert state.held is None, "release a unit before acquiring the next"
            if state.paused:
                state.paused = False
                self._changed.notify_all()
            if state.stale or state.head % self.units != unit:
                self._restart(unit)
            if not self._arrived(state):
                self._wait(state, unit)
            state.held = state.head
            return state.head % self.slots

    def _wait(self, state: _State, unit: int) -> None:
        with self._timeline.span("compute", "wait", unit=self._names[unit]):
            asked = time.perf_counter()
            try:
                while not self._arrived(state):
                    self._changed.wait(_LOOK_AFTER_S)
            finally:
                self.stats.wait_seconds += time.perf_counter() - asked

    def _arrived(self, state: _State) -> bool:
        """Whether the unit at the head is whole. Raises what keeps it from ever being so."""
        # A failed job leaves its unit looking filled, so the error is looked for first.
        if state.error is not None:
            raise state.error
        filling = state.fillings.get(state.head)
        if filling is not None and not filling.waiting and not filling.workers:
            return True
        if state.closed:
            raise ClosedError("the engine was closed while a model was being streamed")
        if not any(thread.is_alive() for thread in self._threads):
            raise WorkerDiedError(f"every {self._name} thread has ended")
        return False

    def release(self) -> None:
        """Give the acquired slot back to be filled anew."""
        with self._changed:
            state = self._state
            assert state.held is not None
            state.fillings.pop(state.held, None)
            state.head, state.held = state.head + 1, None
            self._changed.notify_all()

    def abandon(self) -> None:
        """After an error or an interrupt: forget what is held and what failed; the ring can be used again.

        It stands still until the next `acquire`, by which time what failed may have been mended.
        """
        with self._changed:
            self._state.held = None
            self._restart(0)
            self._state.error = None
            self._state.paused = True
            if not self._state.closed:
                self._threads = [
                    thread if thread.is_alive() else self._start(index)
                    for index, thread in enumerate(self._threads)
                ]

    def close(self) -> None:
        """Stop the workers and wait for them. May be called twice."""
        with self._changed:
            self._state.closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _restart(self, unit: int) -> None:
        state = self._state
        # An interrupt while waiting here must not let a half-filled slot pass for a whole one.
        state.stale = True
        for filling in state.fillings.values():
            filling.waiting.clear()
        while any(filling.running for filling in state.fillings.values()):
            self._changed.wait(_LOOK_AFTER_S)
        state.fillings.clear()
        state.head = state.next_fill = unit
        state.stale = False
        self._changed.notify_all()

    def _take(self) -> tuple[_Filling, Job, int] | None:
        """The next job in order, or None when the ring closes. Called with the lock held."""
        state = self._state
        while not state.closed:
            if state.error is None and not state.paused and not state.stale:
                for sequence in sorted(state.fillings):
                    filling = state.fillings[sequence]
                    if filling.waiting:
                        filling.workers.append(threading.current_thread())
                        return filling, filling.waiting.pop(0), sequence % self.slots
                if state.next_fill < state.head + self.slots:
                    unit = state.next_fill % self.units
                    state.fillings[state.next_fill] = _Filling(unit, self._jobs_of(unit))
                    state.next_fill += 1
                    continue
            self._changed.wait()
        return None

    def _work(self, track: str) -> None:
        while True:
            with self._changed:
                taken = self._take()
            if taken is None:
                return
            filling, job, slot = taken
            moved, error = 0, None
            try:
                with self._timeline.span(track, self._names[filling.unit], slot=slot):
                    moved = job(slot)
            except Exception as caught:  # every failure must reach the caller, none may end the thread
                error = caught
            except BaseException as caught:  # an exit asked for in a worker must not end the caller
                error = WorkerDiedError(f"a {self._name} thread was told to end: {caught!r}")
            with self._changed:
                filling.workers.remove(threading.current_thread())
                self.stats.bytes_moved += moved
                if error is not None and self._state.error is None:
                    self._state.error = error
                self._changed.notify_all()
