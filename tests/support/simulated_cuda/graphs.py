"""CUDA graphs: tasks recorded while a stream is captured, and submitted again at each replay."""

import threading
import weakref
from collections.abc import Hashable
from typing import Any

from tests.support.simulated_cuda.errors import SimulatedCudaError
from tests.support.simulated_cuda.machine import machine
from tests.support.simulated_cuda.streams import Task


class Recording:
    """Tasks and state of one capture.

    mode: as in CUDA: "thread_local" forbids calls that cannot be captured in this thread, "global" in all
        threads.
    """

    def __init__(self, device: int, pool: Hashable, mode: str) -> None:
        self.device, self.pool, self.mode = device, pool, mode
        self.thread = threading.get_ident()
        self.tasks: list[Task] = []
        self.open, self.failed = True, False

    def forbids(self) -> bool:
        """Return whether the capture forbids calls of this thread that it cannot record."""
        own = self.thread == threading.get_ident()
        return self.open and (self.mode == "global" or (self.mode == "thread_local" and own))


class GraphBase:
    """Replaces torch._C._CUDAGraph."""

    _recording: Recording | None

    def __new__(cls, keep_graph: bool = False) -> "GraphBase":
        made = super().__new__(cls)
        made._recording = None
        return made

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        of = machine()
        queue = of.current_queue()
        if queue.number == 0:
            raise SimulatedCudaError("CUDA graphs must be captured on a non-default stream.")
        allocator = of.devices[queue.device].allocator
        handle = of.new_pool() if pool is None else tuple(pool)
        if not allocator.pools[handle] and allocator.has_pool(handle):
            raise SimulatedCudaError("the graphs of this pool are gone, and memory of it is still in use")
        allocator.pools[handle] += 1
        weakref.finalize(self, allocator.pools.subtract, {handle: 1})
        self._recording = queue.recording = Recording(queue.device, handle, capture_error_mode)
        of.recordings.append(self._recording)

    def capture_end(self) -> None:
        of, recording = machine(), self._recording
        assert recording is not None, "capture_end without capture_begin"
        recording.open = False
        of.recordings.remove(recording)
        for queue in of.scheduler.queues:
            if queue.recording is recording:
                queue.recording = None
        if recording.failed:
            self._recording = None
            raise SimulatedCudaError("operation failed due to a previous error during capture")

    def replay(self) -> None:
        assert self._recording is not None, "replay of a graph that was not captured"
        of = machine()
        of.counts["replays"] += 1
        queue = of.current_queue(self._recording.device)
        for task in self._recording.tasks:
            of.scheduler.submit(queue, task)

    def reset(self) -> None:
        self._recording = None

    def pool(self) -> Hashable:
        assert self._recording is not None
        return self._recording.pool
