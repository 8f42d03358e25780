"""Noticing that other processes take the processors, and keeping threads that wait from spinning then.

A thread that spins at the end of a product takes the processor from the very thread that it waits for, where
other processes want the processors too: beside as many busy processes as cores, an answer took ten times its
time. In a process with more OpenMP threads than there are processors, libgomp's threads spin for a hundred
turns at most (GOMP_SPINCOUNT in its manual), and a second team makes it so. The number of threads that
compute stays the same, hence so does every rounding. On an idle machine threads spin as `core.openmp` says.
"""

import threading
from pathlib import Path
from time import perf_counter_ns

import torch

_SCHEDULED = Path("/proc/thread-self/schedstat")  # ns on a processor, ns of waiting for one, times
_WINDOW = 50_000_000  # ns, at least, from one look to the next
# The share of time spent waiting for a processor that tells a busy machine, in two windows one after the
# other: in one it may be a program that has just begun and ended.
_BUSY = 0.25
# Threads that sleep wait for a processor now and then on an idle machine, too, so what tells that it is idle
# again is a window in which they spin: after so many ns of work, and where it is soon found busy again after
# twice as many, up to the second number.
_ASLEEP, _LONGEST = 500_000_000, 16_000_000_000
_ELEMENTS = 1 << 18  # enough for torch to share them among its threads


class Contention:
    """Keeps waiting threads from spinning while the calling thread has to wait for a processor.

    To be told when work begins, and to look often from then on, which costs next to nothing most of the time.
    """

    def __init__(self) -> None:
        self._idle_team: _IdleTeam | None = None
        self.seen = False  # whether it was ever busy
        self._doubted = False  # whether the window before told so
        self._asleep = _ASLEEP  # ns of work that threads sleep for, this time or the last
        self._spent = _ASLEEP  # ns of work since they began to sleep, or to spin
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
        self._spent += now - then
        if self._idle_team is not None:
            if self._spent >= self._asleep:
                self.close()
            return
        doubted, self._doubted = self._doubted, (waiting - waited) / (now - then) > _BUSY
        if not (doubted and self._doubted):
            return
        self.seen = True
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
    """A thread with an OpenMP team of its own, both asleep: it makes the threads more than the processors."""

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
    """The time, and how long this thread has waited for a processor (0 where that is unknown), in ns."""
    try:
        waited = int(_SCHEDULED.read_text().split()[1])
    except (OSError, IndexError, ValueError):
        waited = 0
    return perf_counter_ns(), waited
