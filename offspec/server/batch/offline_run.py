"""Offline batch run, which answers all lines of a file and ends: `offspec batch`."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from offspec.core.events import Event, LoadProgress, Notice
from offspec.server.api_errors import openai_error
from offspec.server.batch.line_processor import LineProcessor, parse_usage, result
from offspec.server.batch.lines import Line
from offspec.server.batch.results import ResultFile
from offspec.server.service import Service
from offspec.server.threads import run_in_thread


class OfflineBatchRun(ABC):
    """Batch run over the lines of a file.

    tokens: number of answer tokens of this run.

    Args:
        results: File that receives the results. Lines with a result in it are skipped.
        notify: Called with Notice events, and with LoadProgress events for loading and then for answers.
    """

    def __init__(self, results: ResultFile, notify: Callable[[Event], None]) -> None:
        self._results, self._notify = results, notify
        self._done = self._total = self.tokens = 0

    def run(self, lines: Iterable[Line]) -> None:
        """Answer all lines without a result. Finished results are kept if the run raises.

        Raises:
            OffspecError: The model cannot be loaded, or a result cannot be written.
            KeyboardInterrupt: The run was stopped.
        """
        lines = list(lines)
        waiting = [line for line in lines if line.id not in self._results.done]
        self._done, self._total = len(lines) - len(waiting), len(lines)
        if all(line.fault for line in waiting):  # no model is needed
            self._keep_errors(waiting)
        else:
            self._answer(waiting)

    @abstractmethod
    def _answer(self, waiting: Sequence[Line]) -> None:
        """Answer the lines and add their results."""

    def _keep_errors(self, lines: Iterable[Line]) -> None:
        """Add the errors of invalid lines to the results."""
        for line in lines:
            if line.fault is not None:
                self._keep(line.id, 0, result(line, line.fault.status, openai_error(line.fault)))

    def _keep(self, name: str, tokens: int, value: dict[str, Any]) -> None:
        self._results.add(name, value)
        self._count(tokens)

    def _count(self, tokens: int) -> None:
        self.tokens += tokens
        self._done += 1
        self._report_progress()

    def _report_progress(self) -> None:
        self._notify(LoadProgress("answering", self._done, self._total, "answers"))


class BatchRun(OfflineBatchRun):
    """Batch run that answers lines with a service in this process.

    Args:
        service: Service that `run` starts and stops.
        results: See `OfflineBatchRun`.
        notify: See `OfflineBatchRun`.
    """

    def __init__(self, service: Service, results: ResultFile, notify: Callable[[Event], None]) -> None:
        super().__init__(results, notify)
        self._service = service
        self._stopped = False
        self._cancel: Callable[[], object] = lambda: None  # cancels the running task

    def _answer(self, waiting: Sequence[Line]) -> None:
        try:
            asyncio.run(self._run(waiting))
        except asyncio.CancelledError:
            if not self._stopped:
                raise
        if self._stopped:
            raise KeyboardInterrupt

    def stop(self) -> None:
        """End `run`. Call this in signal handlers, because an exception raised there may reach any task."""
        self._stopped = True
        self._cancel()

    async def _run(self, waiting: Sequence[Line]) -> None:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        self._cancel = partial(loop.call_soon_threadsafe, task.cancel)
        if self._stopped:
            return
        self._service.start()
        try:
            await self._wait_until_loaded()
            self._notify(Notice(self._service.sampling_summary))
            self._report_progress()
            count = self._service.engine.sequences + 1  # one line is queued
            processor = LineProcessor(self._service, self._service.names[0], self._take, in_flight=count)
            await processor.run(iter(waiting))
        finally:
            self._cancel = lambda: None
            await self._service.stop(0)
            await asyncio.to_thread(self._service.join, 60.0)

    async def _wait_until_loaded(self) -> None:
        """Wait until the model is loaded. Raises the error if loading fails."""
        while self._service.state == "loading":
            self._forward_notices()
            self._notify(self._service.progress)
            await asyncio.sleep(0.05)
        self._forward_notices()
        if self._service.error is not None:
            raise self._service.error

    async def _take(self, line: Line, status: int, value: dict[str, Any]) -> None:
        await run_in_thread(self._results.add, line.id, result(line, status, value))
        self._count(parse_usage(value).answer_tokens)

    def _forward_notices(self) -> None:
        while self._service.notices:
            self._notify(self._service.notices.popleft())

    def _report_progress(self) -> None:
        self._forward_notices()
        super()._report_progress()
