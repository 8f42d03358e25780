"""Main loop of an engine (continuous batching): sequences share passes, and join and leave between passes."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from offspec.core.errors import ClosedError, RequestError
from offspec.core.events import Event, Finished
from offspec.core.threads import STOPPED
from offspec.engine.decode_state import DecodeState, StatePool
from offspec.engine.pass_runner import PassRunner, is_sequence_error
from offspec.engine.request import ScheduledRequest
from offspec.engine.sequence import RunningSequence

_LOOK_S = 0.05  # interval for checking queued requests while no pass runs
_IDLE_S = 1.0  # then the thread ends, so an engine that was never closed can be garbage-collected


class Scheduler:
    """Runs shared passes of sequences in a separate thread.

    Args:
        begin: Creates a sequence from a request and a state.
        passes: Runs passes.
        states: Pool of states; requests without a free state are queued, first come first served.
    """

    def __init__(
        self,
        begin: Callable[[ScheduledRequest, DecodeState], RunningSequence],
        passes: PassRunner,
        states: StatePool,
    ) -> None:
        self._begin, self._passes, self._states = begin, passes, states
        self._waiting = deque[ScheduledRequest]()
        self._running = list[RunningSequence]()
        self._wakeups = queue.SimpleQueue[None]()
        self._busy_at = 0.0  # last time any request was running or queued
        self._submitting, self._pass_lock = threading.Lock(), threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def in_scheduler_thread(self) -> bool:
        """Whether the calling thread is the thread that runs passes."""
        return self._thread is threading.current_thread()

    def submit(self, answer: ScheduledRequest) -> None:
        """Queue a request. Raises ClosedError."""
        with self._submitting:
            if self._closing.is_set():
                raise closed_error()
            self._waiting.append(answer)
            self._busy_at = time.monotonic()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="offspec passes", daemon=True)
                self._thread.start()
        self.wake()

    def wake(self) -> None:
        """Make the loop check for due and cancelled answers; callable from any thread."""
        self._wakeups.put(None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """End cancelled sequences, then run no pass and begin no request until the end of the block."""
        with self._pass_lock:
            self._end_cancelled()
            yield

    def close(self) -> None:
        """Halt running requests, reject queued ones, and wait for the thread to end. May be called twice."""
        with self._submitting:
            self._closing.set()
            thread = self._thread
        for sequence in [*self._running]:
            sequence.answer.cancel()  # cancels its pass
        self.wake()
        if thread is not None:
            thread.join()

    def _work(self) -> None:
        while not self._closing.is_set():
            if self._stop_if_idle():
                return
            try:
                with self._pass_lock:
                    ran = self._round()
            except BaseException as error:  # unexpected: end all requests, so that no reader waits forever
                self._fail(error)
            else:
                if not ran:
                    self._sleep()
        for sequence in [*self._running]:
            self._end(sequence)
        self._fail(closed_error())

    def _stop_if_idle(self) -> bool:
        """Return whether the thread should end, being idle; the next request then starts a new thread."""
        with self._submitting:
            if self._running or self._waiting or time.monotonic() - self._busy_at < _IDLE_S:
                return False
            self._thread = None
            return True

    def _sleep(self) -> None:
        """Wait until an answer may be due."""
        timeout = _LOOK_S if self._waiting else None if self._running else _IDLE_S
        with suppress(queue.Empty):
            self._wakeups.get(timeout=timeout)
            while True:
                self._wakeups.get_nowait()

    def _round(self) -> bool:
        """Begin requests, end cancelled ones, and run a pass for those due; return whether a pass ran."""
        self._admit()
        self._end_cancelled()
        if self._running or self._waiting:
            self._busy_at = time.monotonic()
        if self._closing.is_set():
            return False
        shared = len(self._running) > 1
        due = [one for one in self._running if one.answer.is_due(shared)]
        if due:
            self._step(due)
        return bool(due)

    def _end_cancelled(self) -> None:
        for sequence in [one for one in self._running if one.halted]:
            self._end(sequence)

    def _admit(self) -> None:
        """Begin queued requests while states are free, and end cancelled ones.

        A request that waits for another sequence to compute its prefix does not block later requests.
        """
        for answer in [*self._waiting]:
            if self._closing.is_set():
                break
            if answer.cancelled():
                self._waiting.remove(answer)
                answer.put((), error=RequestError(STOPPED))
            else:
                self._start(answer)

    def _start(self, answer: ScheduledRequest) -> None:
        """Begin a request if a state is free.

        If creating a state fails, probably for lack of memory, the request stays queued while others run.
        """
        state: DecodeState | None = None
        try:
            if (state := self._states.acquire(answer.request.ids)) is None:
                return
            sequence = self._begin(answer, state)
        except BaseException as error:  # affects this request only
            if state is not None:
                self._states.release(state)
            elif self._running:
                return
            self._waiting.remove(answer)
            answer.put((), error=self._passes.user_error(error))
            return
        self._waiting.remove(answer)
        self._running.append(sequence)
        answer.put([sequence.prefill])
        if sequence.reason is not None:
            self._finish(sequence, ())

    def _step(self, due: list[RunningSequence]) -> None:
        """Run one pass. If a single sequence may have made it fail, run each separately: others continue."""
        try:
            found = self._passes.step(due)
        except BaseException as error:
            if len(due) > 1 and is_sequence_error(error):
                for sequence in due:
                    self._step([sequence])
            else:
                for sequence in due:
                    self._end(sequence, error)
            return
        for sequence, events in zip(due, found, strict=True):
            if sequence.error is not None:
                self._end(sequence, sequence.error)
            elif sequence.reason is not None:
                self._finish(sequence, events)
            else:
                sequence.answer.put(events)

    def _end(self, sequence: RunningSequence, error: BaseException | None = None) -> None:
        """End a sequence early, with its held-back text if that can be decoded."""
        try:
            events = sequence.halt()
        except Exception as fault:
            events, error = [], error or fault
        self._finish(sequence, events, error)

    def _finish(
        self, sequence: RunningSequence, events: Sequence[Event], error: BaseException | None = None
    ) -> None:
        if error is None:
            try:
                events = [*events, Finished(sequence.result)]
            except Exception as fault:
                error = fault
        self._running.remove(sequence)
        self._states.release(sequence.state)
        sequence.answer.put(events, ended=True, error=error)

    def _fail(self, error: BaseException) -> None:
        for sequence in [*self._running]:
            self._finish(sequence, (), error)
        while self._waiting:
            self._waiting.popleft().put((), error=error)


def closed_error() -> ClosedError:
    """Return the error for a request to a closed engine."""
    return ClosedError("this engine was closed; load the model again")
