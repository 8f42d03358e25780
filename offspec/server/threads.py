"""Blocking work, such as writing to disk, off the event loop."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


async def run_in_thread(work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Run blocking work in a thread and return its result.

    If the task is cancelled meanwhile, CancelledError is raised only after the work has ended. The task can
    then close or remove a file that the thread used.
    """
    running = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait((running,))
        running.exception()  # mark as retrieved; CancelledError is raised instead
        raise
