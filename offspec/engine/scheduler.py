"""Requests that share passes: they join and leave between one pass and the next."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from offspec.core.errors import ClosedError, RequestError
from offspec.core.events import Event, Finished
from offspec.engine.answer import Answer
from offspec.engine.decode import DecodeState
from offspec.engine.passes import Passes
from offspec.engine.request import RunningRequest
from offspec.engine.sequences import Sequences

Begin = Callable[[Answer, DecodeState], RunningRequest]


@dataclass(frozen=True, slots=True)
class _Running:
    answer: Answer
    request: RunningRequest


class Scheduler:
    """Takes answers through passes together, in a thread of its own, as long as any is asked for.

    Args:
        begin: Makes a request run with the state of a sequence.
        passes: Runs passes.
        sequences: Are lent to requests; the others wait, first come first served.
        turn: The use of the engine, for as long as the block runs, or until the event is set.
    """

    def __init__(
        self,
        begin: Begin,
        passes: Passes,
        sequences: Sequences,
        turn: Callable[[threading.Event], AbstractContextManager[None]],
    ) -> None:
        self._begin, self._passes, self._sequences, self._turn = begin, passes, sequences, turn
        self._waiting = deque[Answer]()
        self._running = list[_Running]()
        self._asked = threading.Condition()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_here(self) -> bool:
        """Whether the thread that asks is the one that runs passes."""
        return self._thread is threading.current_thread()

    def submit(self, answer: Answer) -> None:
        """Have a request answered. Raises ClosedError."""
        with self._asked:
            if self._closing.is_set():
                raise _closed()
            self._waiting.append(answer)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="offspec passes", daemon=True)
                self._thread.start()
            self._asked.notify()

    def close(self) -> None:
        """Halt what runs, refuse what waits, and end the thread. May be called twice."""
        with self._asked:
            self._closing.set()
            self._asked.notify()
        for running in [*self._running]:
            running.answer.cancel()
        if self._thread is not None and not self.is_here:
            self._thread.join()

    def _work(self) -> None:
        while self._wait():
            try:
                with self._turn(self._closing):
                    while self._admit() or self._running:
                        self._run()
            except BaseException as error:  # the engine was closed, or a bug: nobody is to wait for ever
                self._fail(_closed() if self._closing.is_set() else error)
        self._fail(_closed())

    def _wait(self) -> bool:
        """Wait until there is something to do; False where there will be no more."""
        with self._asked:
            self._asked.wait_for(lambda: self._waiting or self._closing.is_set())
            return not self._closing.is_set()

    def _admit(self) -> bool:
        """Begin requests that there are sequences for, and end what was cancelled; whether any runs.

        One that another reads its prompt for holds up none of those behind it.
        """
        for answer in [*self._waiting]:
            if self._closing.is_set():
                break
            if answer.cancelled():
                self._waiting.remove(answer)
                answer.put((), error=RequestError("this was stopped before its turn came"))
            else:
                self._start(answer)
        return bool(self._running)

    def _start(self, answer: Answer) -> None:
        """Begin a request if there is a sequence for it, and memory, which those that run may give back."""
        state: DecodeState | None = None
        try:
            if (state := self._sequences.take(answer.request.ids)) is None:
                return
            running = _Running(answer, self._begin(answer, state))
        except BaseException as error:  # of this request alone
            if state is not None:
                self._sequences.give_back(state)
            elif self._running:
                return
            self._waiting.remove(answer)
            answer.put((), error=self._passes.told(error))
            return
        self._waiting.remove(answer)
        self._running.append(running)
        answer.put([running.request.prefill])
        if running.request.reason is not None:
            self._finish(running, ())

    def _run(self) -> None:
        """One pass for all that run."""
        if self._closing.is_set():
            for running in self._running:
                running.answer.cancel()
        for running in [one for one in self._running if one.request.halted]:
            self._end(running)
        if self._running:
            self._step([*self._running])

    def _step(self, every: Sequence[_Running]) -> None:
        """One pass. Where it fails each goes by itself, so that a fault of one ends no other."""
        try:
            found = self._passes.step([one.request for one in every])
        except BaseException as error:
            if len(every) > 1 and isinstance(error, Exception):
                for running in every:
                    self._step([running])
            else:
                for running in every:
                    self._end(running, error)
            return
        for running, events in zip(every, found, strict=True):
            request = running.request
            if request.error is not None:
                self._end(running, request.error)
            elif request.reason is not None:
                self._finish(running, events)
            else:
                running.answer.put(events)

    def _end(self, running: _Running, error: BaseException | None = None) -> None:
        """End a request before its time, with the text that it holds back if that can be spelt."""
        try:
            events = running.request.halt()
        except Exception as fault:
            events, error = [], error or fault
        self._finish(running, events, error)

    def _finish(
        self, running: _Running, events: "list[Event] | tuple[()]", error: BaseException | None = None
    ) -> None:
        self._running.remove(running)
        self._sequences.give_back(running.request.state)
        if error is None:
            running.answer.put([*events, Finished(running.request.result)], ended=True)
        else:
            running.answer.put(events, error=error)

    def _fail(self, error: BaseException) -> None:
        """Nothing of what runs or waits comes to an end."""
        for running in [*self._running]:
            self._finish(running, (), error)
        while self._waiting:
            self._waiting.popleft().put((), error=error)


def _closed() -> ClosedError:
    return ClosedError("this engine was closed; load the model again")
