"""Detection of CPU contention from other processes, during which waiting threads do not spin.

If other processes compete for the processors, a thread that spins at the end of a product occupies the
processor that the thread it waits for needs. With as many busy processes as cores, an answer took ten times
as long. If a process has more OpenMP threads than there are processors, libgomp's threads spin at most a
hundred times (GOMP_SPINCOUNT in its manual). A second, idle team brings this about. The number of computing
threads stays the same, and so does every rounding. On an idle machine threads spin as `core.openmp`
configures.
"""

import threading
from pathlib import Path
from time import perf_counter_ns

import torch

_SCHEDULED = Path("/proc/thread-self/schedstat")  # ns on a processor, ns waiting for one, time slices
_WINDOW = 50_000_000  # ns, minimum between two measurements
# Share of time spent waiting for a processor that marks a busy machine, in two successive windows: a single
# window may just contain a short-lived program.
_BUSY = 0.25
# Sleeping threads sometimes wait for a processor on an idle machine, too, so only a window in which they spin
# shows that the machine is idle again. The first such window comes after _ASLEEP ns of work. Each time the
# machine is soon found busy again, the delay doubles, up to _LONGEST.
_ASLEEP, _LONGEST = 500_000_000, 16_000_000_000
_ELEMENTS = 1 << 18  # enough for torch to share them among its threads


class CpuContention:
    """Stops waiting threads from spinning while the calling thread has to wait for a processor.

    Call `begin` when work starts, and then `poll` often, which costs next to nothing most of the time.
    """

    def __init__(self) -> None:
        self._idle_team: _IdleTeam | None = None
        self.was_busy = False  # whether the machine was ever busy
        self._doubted = False  # whether it seemed busy in the previous window
        self._asleep = _ASLEEP  # ns of work for which threads sleep, now or most recently
        self._spent = _ASLEEP  # ns of work since threads last began to sleep or to spin
        self.begin()

    def begin(self) -> None:
        """Start measuring the calling thread, ignoring the time before."""
        self._seen = _now()

    @property
    def busy(self) -> bool:
        """Whether the latest measurement found other processes competing for the processors."""
        return self._idle_team is not None

    def poll(self) -> None:
        """Compare the time that the calling thread waited for a processor with the elapsed time."""
        if perf_counter_ns() - self._seen[0] < _WINDOW:
            return
        (then, waited), (now, waiting) = self._seen, _now()
        self._seen = now, waiting
        self._spent += now - then
        if self._idle_team is not None:
            if self._spent >= self._asleep:
                self.close()
            return
        doubted, self._doubted = self._doubted, (waiting - waited) / (now - then) > _BUSY
        if not (doubted and self._doubted):
            return
        self.was_busy = True
        if torch.get_num_threads() > 1:
            again = self._spent < _ASLEEP
            self._asleep = min(2 * self._asleep, _LONGEST) if again else _ASLEEP
            self._spent = 0
            self._idle_team = _IdleTeam()

    def close(self) -> None:
        """Let threads spin again. May be called twice."""
        if self._idle_team is not None:
            self._idle_team.end()
            self._idle_team, self._spent = None, 0


class _IdleTeam(threading.Thread):
    """Sleeping thread with its own sleeping OpenMP team, so that there are more threads than processors."""

    def __init__(self) -> None:
        super().__init__(name="offspec-idle-team", daemon=True)
        self._over = threading.Event()
        self.start()

    def run(self) -> None:
        torch.zeros(_ELEMENTS).add_(1)  # forms the team
        self._over.wait()

    def end(self) -> None:
        self._over.set()
        self.join()


def _now() -> tuple[int, int]:
    """Return the time and how long this thread has waited for a processor (0 if unknown), in ns."""
    try:
        waited = int(_SCHEDULED.read_text().split()[1])
    except (OSError, IndexError, ValueError):
        waited = 0
    return perf_counter_ns(), waited
