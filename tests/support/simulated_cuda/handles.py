"""Replacements of torch's base classes of streams and events, which torch.cuda derives from."""

import threading
from typing import Any

import torch

from tests.support.simulated_cuda.errors import SimulatedCudaError
from tests.support.simulated_cuda.machine import machine
from tests.support.simulated_cuda.streams import Mark, Queue, Task

_CUDA = 1  # its number among torch's kinds of devices


class StreamBase:
    """A handle of a queue; several handles may name the same queue."""

    queue: Queue

    def __new__(
        cls,
        priority: int = 0,
        stream_id: int | None = None,
        device_index: int | None = None,
        device_type: int | None = None,
    ) -> "StreamBase":
        made, of = super().__new__(cls), machine()
        device = of.device if device_index is None else device_index
        made.queue = of.new_queue(device) if stream_id is None else of.devices[device].streams[stream_id]
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @property
    def stream_id(self) -> int:
        return self.queue.number

    @property
    def cuda_stream(self) -> int:
        return self.queue.number

    @property
    def device_index(self) -> int:
        return self.queue.device

    @property
    def device_type(self) -> int:
        return _CUDA

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.queue.device)

    def query(self) -> bool:
        return self.queue.done >= self.queue.submitted

    def synchronize(self) -> None:
        machine().host_waits("stream.synchronize", [self.queue.end])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StreamBase) and other.queue is self.queue

    def __hash__(self) -> int:
        return hash(self.queue)


class EventBase:
    """A mark in a queue, once recorded."""

    mark: Mark | None
    recording: Any

    def __new__(cls, **options: bool) -> "EventBase":
        made = super().__new__(cls)
        made.mark = made.recording = None
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @property
    def cuda_event(self) -> int:
        return id(self) if self.mark is not None else 0

    def record(self, stream: StreamBase) -> None:
        self.mark, self.recording = stream.queue.end, stream.queue.recording

    def wait(self, stream: StreamBase) -> None:
        queue, own = stream.queue, self.recording
        if own is not None and own.open and queue.recording is not own:
            if queue.recording is not None or queue.number == 0:
                raise SimulatedCudaError("a stream outside of a capture cannot wait for one inside")
            queue.recording = own  # the capture includes this queue from now on
        if queue.recording is None and self.mark is not None:
            machine().scheduler.submit(queue, Task("wait for an event", None, self.mark))
        elif queue.recording is not None and own is not queue.recording:
            queue.recording.failed = True
            raise SimulatedCudaError("dependency created on uncaptured work in another stream")

    def query(self) -> bool:
        return self.mark is None or self.mark.queue.done >= self.mark.tasks

    def synchronize(self) -> None:
        machine().host_waits("event.synchronize", [] if self.mark is None else [self.mark])

    def elapsed_time(self, end: "EventBase") -> float:
        """Return 1 millisecond: a simulated device does not model time."""
        if self.mark is None or end.mark is None:
            raise SimulatedCudaError("both events must be recorded before their distance is asked for")
        return 1.0


def is_capturing() -> bool:
    recording = machine().current_queue().recording
    return recording is not None and recording.thread == threading.get_ident()
