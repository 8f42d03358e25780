"""OpenMP threads on a machine that does other work too.

torch computes with a team of OpenMP threads that wait for each other at the end of every product. While they
wait they spin, by libgomp's default for milliseconds. Where other processes want the processors too, a
spinning thread takes the processor from the very thread that it waits for: beside as many busy processes as
cores, answers took ten times as long. Sleeping at once instead costs a third of the speed of an idle machine.

So threads spin for a third of a millisecond, and hardly at all while this process has to wait for processors.
Where a process has more OpenMP threads than there are processors, libgomp's threads spin for a hundred turns
at most (GOMP_SPINCOUNT in its manual), and a second team makes it so. The number of threads that compute
stays the same, hence so does every rounding.
"""

import os
import sys
import threading
from pathlib import Path
from time import perf_counter_ns

# Turns of a waiting thread's loop before it sleeps, some 15 ns each.
SPINS = 20_000

_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_SCHEDULED = Path("/proc/thread-self/schedstat")  # ns on a processor, ns of waiting for one, times
_WINDOW = 50_000_000  # ns, at least, from one look to the next
# Shares of time spent waiting for a processor: one tells a busy machine, the other an idle one where
# it holds for so many ns of work. Threads that sleep do not wait in every window.
_BUSY, _IDLE, _CALM = 0.25, 0.05, 1_000_000_000
_ELEMENTS = 1 << 18  # enough for torch to share them among its threads


def limit_spinning() -> None:
    """Let waiting threads of this process sleep early, unless the environment says how they are to wait.

    libgomp reads its settings when it is loaded, so this does nothing once torch was imported.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in _VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)


def unlimited_spinning() -> str | None:
    """What to tell the user where torch was imported too early for `limit_spinning`, else None."""
    import torch

    if torch.get_num_threads() == 1 or any(name in os.environ for name in _VARIABLES):
        return None
    return (
        "torch was imported before offspec could limit how long its threads spin, so other processes may "
        f"slow answers down; name offspec.load before importing torch, or set GOMP_SPINCOUNT={SPINS}"
    )


class Contention:
    """Keeps waiting threads from spinning while the calling thread has to wait for a processor.

    To be told when work begins, and to look often from then on, which costs next to nothing most of the time.
    """

    def __init__(self) -> None:
        self._idle_team: _IdleTeam | None = None
        self._calm = 0  # ns of work, up to the latest look, in which there was next to no waiting
        self.begin()

    def begin(self) -> None:
        """The calling thread works from now on: the time before says nothing."""
        self._seen = _now()

    @property
    def busy(self) -> bool:
        """Whether the latest look found that other processes take the processors."""
        return self._idle_team is not None

    def look(self) -> None:
        """Compare the time that the calling thread waited for a processor with the time that passed."""
        if perf_counter_ns() - self._seen[0] < _WINDOW:
            return
        (then, waited), (now, waiting) = self._seen, _now()
        self._seen = now, waiting
        share = (waiting - waited) / (now - then)
        self._calm = self._calm + now - then if share < _IDLE else 0
        if share > _BUSY and self._idle_team is None:
            self._idle_team = _IdleTeam()
        elif self._calm >= _CALM:
            self.close()

    def close(self) -> None:
        """Let threads spin again. May be called twice."""
        if self._idle_team is not None:
            self._idle_team.end()
            self._idle_team = None


class _IdleTeam:
    """A thread with an OpenMP team of its own, both asleep: it makes the threads more than the processors."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._hold, name="offspec-idle-team", daemon=True)
        self._thread.start()

    def _hold(self) -> None:
        import torch

        torch.zeros(_ELEMENTS).add_(1)  # forms the team
        self._over.wait()

    def end(self) -> None:
        self._over.set()


def _now() -> tuple[int, int]:
    """The time, and how long this thread has waited for a processor (0 where that is unknown), in ns."""
    try:
        waited = int(_SCHEDULED.read_text().split()[1])
    except (OSError, IndexError, ValueError):
        waited = 0
    return perf_counter_ns(), waited
