"""Drafting while the target's pass is on its way: a tree grows on below its likeliest leaves, in a thread.

When the walk has ended, what was grown below the next root is where the next tree begins. It pays where the
processor waits for weights: the draft takes what of it is idle, with half of the threads at a low priority.
"""

import os
import threading
import time
from contextlib import suppress

import torch

from offspec.draft.grow.growing import Growing
from offspec.model.runner import TreeModel

_LOW_PRIORITY = 19  # nice's


class DraftAhead:
    """Grows one tree on, as long as the block runs.

    Args:
        growing: The tree, of which nobody else asks anything meanwhile.
        target: Whose pass is on its way: no step begins that would end behind it.
    """

    def __init__(self, growing: Growing, target: TreeModel) -> None:
        self.seconds = 0.0  # that it went on for
        self._growing, self._target = growing, target
        self._before, self._layers = target.spent, len(target.skeleton.layers)
        self._over = threading.Event()
        self._set_up = threading.Event()
        self._error: Exception | None = None
        self._began = self._step = time.perf_counter()
        self._thread = threading.Thread(target=self._work, name="offspec draft", daemon=True)

    def __enter__(self) -> "DraftAhead":
        threads = torch.get_num_threads()
        try:
            self._thread.start()
            self._set_up.wait()
        except BaseException:
            self._end()
            raise
        finally:
            torch.set_num_threads(threads)  # the other thread's number is that of all threads to come as well
        return self

    def _end(self) -> None:
        """Wait until the thread has ended, also where Ctrl-C strikes meanwhile."""
        self._over.set()
        try:
            if self._thread.ident is not None:
                self._thread.join()
        finally:
            if self._thread.ident is not None:
                self._thread.join()

    def __exit__(self, *raised: object) -> None:
        self._end()
        if self._error is not None:
            self._growing.failed(self._error)

    def _work(self) -> None:
        try:
            torch.set_num_threads(max(torch.get_num_threads() // 2, 1))
        finally:
            self._set_up.set()
        with suppress(OSError, AttributeError):  # where threads have no priority of their own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)
        try:
            with torch.no_grad():
                self._growing.foresee(self._goes_on)
        except Exception as error:  # it costs no answer: what was grown so far holds
            self._error = error
        self.seconds = time.perf_counter() - self._began

    def _goes_on(self) -> bool:
        """Whether the pass is likely to take longer than another step."""
        now = time.perf_counter()
        step, self._step = now - self._step, now
        if self._over.is_set():
            return False
        spent = self._target.spent
        done = 0 if spent is self._before else spent.layers
        return done == 0 or (now - self._began) * (self._layers - done) > step * done
