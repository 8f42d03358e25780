"""Answers a batch, and ends: `offspec batch`."""

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from offspec.core.events import Event, LoadProgress, Notice
from offspec.server.batch.answering import Answering, result, usage_of
from offspec.server.batch.lines import Line
from offspec.server.batch.results import ResultFile
from offspec.server.faults import openai_error
from offspec.server.service import Service
from offspec.server.threads import in_thread


def _nothing() -> object:
    """Nothing runs that could be cancelled."""


class BatchRun:
    """Lines on their way through a service.

    Args:
        service: Started by `run`, and stopped by it.
        results: Takes what is finished. Lines that are in it are not asked again.
        notify: Takes LoadProgress events, of loading and then of the answers, and Notice events.
    """

    def __init__(self, service: Service, results: ResultFile, notify: Callable[[Event], None]) -> None:
        self._service, self._results, self._notify = service, results, notify
        self._done, self._total = 0, 0  # lines
        self._stopped, self._cancel = False, _nothing
        self.tokens = 0  # of the answers of this run

    def run(self, lines: Iterable[Line]) -> None:
        """Answer all that are not done.

        Raises:
            OffspecError: The model cannot be loaded, or a result cannot be written. What is finished is kept.
            KeyboardInterrupt: `stop` was called; the same.
        """
        lines = list(lines)
        waiting = [line for line in lines if line.id not in self._results.done]
        self._done, self._total = len(lines) - len(waiting), len(lines)
        if all(line.fault for line in waiting):  # no model is needed
            for line in waiting:
                assert line.fault is not None
                value = openai_error(line.fault)
                self._results.add(line.id, result(line, line.fault.status, value))
                self._count(value)
            return
        try:
            asyncio.run(self._run(waiting))
        except asyncio.CancelledError:
            if not self._stopped:
                raise
        if self._stopped:
            raise KeyboardInterrupt

    def stop(self) -> None:
        """End `run`, from a signal handler: what is raised there comes up in any task."""
        self._stopped = True
        self._cancel()

    async def _run(self, waiting: list[Line]) -> None:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        self._cancel = partial(loop.call_soon_threadsafe, task.cancel)
        if self._stopped:
            return
        self._service.start()
        try:
            await self._loaded()
            self._notify(Notice(self._service.sampling_summary))
            self._tell()
            count = self._service.sequences + 1  # one more is ready
            answering = Answering(self._service, self._service.names[0], self._take, in_flight=count)
            await answering.run(iter(waiting))
        finally:
            self._cancel = _nothing
            await self._service.stop(0)
            await asyncio.to_thread(self._service.join, 60.0)

    async def _loaded(self) -> None:
        """Wait until the model is there. Raises what keeps it from being so."""
        while self._service.state == "loading":
            self._tell_notices()
            self._notify(self._service.progress)
            await asyncio.sleep(0.05)
        self._tell_notices()
        if self._service.error is not None:
            raise self._service.error

    async def _take(self, line: Line, status: int, value: dict[str, Any]) -> None:
        await in_thread(self._results.add, line.id, result(line, status, value))
        self._count(value)

    def _count(self, value: dict[str, Any]) -> None:
        self.tokens += usage_of(value).answer_tokens
        self._done += 1
        self._tell()

    def _tell_notices(self) -> None:
        while self._service.notices:
            self._notify(self._service.notices.popleft())

    def _tell(self) -> None:
        self._tell_notices()
        self._notify(LoadProgress("answering", self._done, self._total, "answers"))
