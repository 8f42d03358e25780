"""Notices about numba compiling loops, which takes up to a minute the first time on a machine."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from offspec.core.events import LoadProgress, Notice

_QUIET_S = 2.0


@contextmanager
def notify_compilation(
    notify: Callable[[LoadProgress | Notice], None], *, wanted: bool = True
) -> Iterator[None]:
    """Notify when numba starts to compile, and afterwards how long it took; cached code causes no notice.

    Args:
        notify: Receives LoadProgress and Notice events.
        wanted: False if a GPU computes, for which numba compiles nothing. Default True.
    """
    if not wanted:
        yield
        return
    import numba.core.event as events

    began: list[float] = []

    class Passes(events.Listener):
        def on_start(self, event: object) -> None:
            if not began:
                began.append(time.perf_counter())
                notify(LoadProgress("Compiling CPU kernels (once per machine)", 0, 0, "steps"))

        def on_end(self, event: object) -> None:
            pass

    with events.install_listener("numba:run_pass", Passes()):
        yield
    if began and (seconds := time.perf_counter() - began[0]) > _QUIET_S:
        notify(Notice(f"Compiled CPU kernels in {seconds:.0f} s; later runs reuse them"))
