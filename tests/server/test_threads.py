"""Blocking work off the event loop."""

import asyncio
import threading

import pytest

from offspec.server.threads import run_in_thread
from tests.support.waiting import PATIENCE


@pytest.mark.parametrize("error", [None, OSError("no space left")])
def test_cancelled_task_waits_for_its_work(error: Exception | None) -> None:
    """Also if the work fails; CancelledError is raised in either case."""
    began, gate, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        assert gate.wait(PATIENCE)
        ended.set()
        if error is not None:
            raise error

    async def run() -> None:
        task = asyncio.create_task(run_in_thread(work))
        assert await asyncio.to_thread(began.wait, PATIENCE)
        task.cancel()
        done, _ = await asyncio.wait((task,), timeout=0)
        assert not done
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()

    asyncio.run(run())


def test_results_and_errors_are_returned() -> None:
    assert asyncio.run(run_in_thread(divmod, 7, 2)) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(run_in_thread(divmod, 7, 0))
