"""The one loop of an engine: sequences share passes, and join and leave between one pass and the next."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from offspec.core.errors import ClosedError, RequestError
from offspec.core.events import Event, Finished
from offspec.core.threads import STOPPED
from offspec.engine.decode import DecodeState, StatePool
from offspec.engine.passes import Passes, belongs_to_one
from offspec.engine.request import Submitted
from offspec.engine.sequence import RunningSequence

_LOOK_S = 0.05  # how often requests that wait are looked at, while no pass runs
_IDLE_S = 1.0  # after which the thread ends, so that an engine that is dropped unclosed can be collected


class Scheduler:
    """Takes sequences through passes together, in a thread of its own.

    Args:
        begin: Makes a sequence of a request, with a state.
        passes: Runs passes.
        states: Lends states to sequences; further requests wait, first come first served.
    """

    def __init__(
        self, begin: Callable[[Submitted, DecodeState], RunningSequence], passes: Passes, states: StatePool
    ) -> None:
        self._begin, self._passes, self._states = begin, passes, states
        self._waiting = deque[Submitted]()
        self._running = list[RunningSequence]()
        self._bell = queue.SimpleQueue[None]()
        self._busy_at = 0.0  # when something ran or waited last
        self._submitting, self._turn = threading.Lock(), threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is the one that runs passes."""
        return self._thread is threading.current_thread()

    def submit(self, answer: Submitted) -> None:
        """Have a request answered. Raises ClosedError."""
        with self._submitting:
            if self._closing.is_set():
                raise closed()
            self._waiting.append(answer)
            self._busy_at = time.monotonic()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="offspec passes", daemon=True)
                self._thread.start()
        self.wake()

    def wake(self) -> None:
        """Look for answers that are due or cancelled, from any thread."""
        self._bell.put(None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No pass runs, and no request begins, while the block runs; what was cancelled has ended."""
        with self._turn:
            self._end_cancelled()
            yield

    def close(self) -> None:
        """Halt what runs, refuse what waits, and wait for the end of the thread. May be called twice."""
        with self._submitting:
            self._closing.set()
            thread = self._thread
        for sequence in [*self._running]:
            sequence.answer.cancel()  # so that its pass is broken off
        self.wake()
        if thread is not None:
            thread.join()

    def _work(self) -> None:
        while not self._closing.is_set():
            if self._is_done():
                return
            try:
                with self._turn:
                    ran = self._round()
            except BaseException as error:  # a bug: nothing is to wait for ever
                self._fail(error)
            else:
                if not ran:
                    self._sleep()
        for sequence in [*self._running]:
            self._end(sequence)
        self._fail(closed())

    def _is_done(self) -> bool:
        """Whether nothing came for a while; then the next request starts another thread."""
        with self._submitting:
            if self._running or self._waiting or time.monotonic() - self._busy_at < _IDLE_S:
                return False
            self._thread = None
            return True

    def _sleep(self) -> None:
        """Wait until something may be due."""
        timeout = _LOOK_S if self._waiting else None if self._running else _IDLE_S
        with suppress(queue.Empty):
            self._bell.get(timeout=timeout)
            while True:
                self._bell.get_nowait()

    def _round(self) -> bool:
        """Begin requests, end what was cancelled, and run a pass for what is due; whether one ran."""
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
        """Begin requests that there are states for, and end those that were cancelled.

        One that waits for another to read its prompt holds up none of those after it.
        """
        for answer in [*self._waiting]:
            if self._closing.is_set():
                break
            if answer.cancelled():
                self._waiting.remove(answer)
                answer.put((), error=RequestError(STOPPED))
            else:
                self._start(answer)

    def _start(self, answer: Submitted) -> None:
        """Begin a request if there is a state for it, and memory, which those that run may give back."""
        state: DecodeState | None = None
        try:
            if (state := self._states.take(answer.request.ids)) is None:
                return
            sequence = self._begin(answer, state)
        except BaseException as error:  # of this request alone
            if state is not None:
                self._states.give_back(state)
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
        """One pass. Where a sequence may have failed it, each goes by itself: a fault ends no other."""
        try:
            found = self._passes.step(due)
        except BaseException as error:
            if len(due) > 1 and belongs_to_one(error):
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
        """End a sequence before its time, with the text that it holds back if that can be spelt."""
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
        self._states.give_back(sequence.state)
        sequence.answer.put(events, ended=True, error=error)

    def _fail(self, error: BaseException) -> None:
        for sequence in [*self._running]:
            self._finish(sequence, (), error)
        while self._waiting:
            self._waiting.popleft().put((), error=error)


def closed() -> ClosedError:
    """The error of a request to an engine that was closed."""
    return ClosedError("this engine was closed; load the model again")
