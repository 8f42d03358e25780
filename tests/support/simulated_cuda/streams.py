"""Streams, events, and when their tasks run.

Each action of a device is a task in the queue of a stream. The policy determines whether a task runs as soon
as it is submitted, or only when something waits for it. A device may do both, so a correct program gives the
same result with every policy.
"""

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from tests.support.simulated_cuda.errors import SimulatedCudaError

if TYPE_CHECKING:
    from tests.support.simulated_cuda.graphs import Recording

POLICIES = ("eager", "late", "late-copies", "late-compute", "random:SEED", "sizes")


class Mark(NamedTuple):
    """A point in a queue: after its first `tasks`."""

    queue: "Queue"
    tasks: int


class Span(NamedTuple):
    """Bytes [start, end) of a device's memory, or of the host's if `device` is None."""

    device: int | None
    start: int
    end: int

    def overlaps(self, other: "Span") -> bool:
        return self.device == other.device and self.start < other.end and other.start < self.end


@dataclass(frozen=True, slots=True)
class Task:
    """run: the work; None for a mere wait. after: a mark of another stream that must be reached before.

    spans: the memory that a copy reads and writes.
    """

    name: str
    run: Callable[[], object] | None
    after: Mark | None = None
    spans: tuple[Span, ...] = ()


class Queue:
    """The tasks of one stream; `number` 0 is the device's default stream.

    begun, done: numbers of tasks taken out, and of tasks that ended: another thread may still run the last
    one.
    """

    def __init__(self, device: int, number: int) -> None:
        self.device, self.number = device, number
        self.waiting: deque[Task] = deque()
        self.submitted = self.begun = self.done = 0
        self.recording: Recording | None = None  # collects tasks while a graph is captured

    @property
    def end(self) -> Mark:
        return Mark(self, self.submitted)

    def using(self, span: Span, owner: "Queue | None" = None) -> Iterator[Task]:
        """Pending copies that will use memory, except those that the stream `owner` waits for itself."""
        waits = owner.waiting if owner is not None else ()
        waited = max(
            (task.after.tasks for task in waits if task.after and task.after.queue is self), default=0
        )
        for number, task in enumerate(self.waiting, self.begun + 1):
            if number > waited and any(span.overlaps(used) for used in task.spans):
                yield task


class Scheduler:
    """All queues of a machine, and the policy.

    policy: one of POLICIES. "late-copies" delays all streams except the default ones, "late-compute" delays
        those; "random" runs some tasks of some stream at each submission; "sizes" never runs any.
    """

    def __init__(self, policy: str) -> None:
        name, _, seed = policy.partition(":")
        if name not in {known.partition(":")[0] for known in POLICIES}:
            raise ValueError(f"the policy must be one of {', '.join(POLICIES)}, not {policy}")
        self.policy = name
        self.lock = threading.RLock()
        self.queues: list[Queue] = []
        self._running = False
        self._random = random.Random(seed)

    def add(self, queue: Queue) -> Queue:
        with self.lock:
            self.queues.append(queue)
        return queue

    def submit(self, queue: Queue, task: Task) -> None:
        with self.lock:
            if self.policy == "sizes":
                return
            if queue.recording is not None:
                queue.recording.tasks.append(task)
                return
            queue.waiting.append(task)
            queue.submitted += 1
            if self.policy == "random":
                for some in self._random.choices(self.queues, k=self._random.randrange(3)):
                    self.run_until(Mark(some, some.done + self._random.randint(0, len(some.waiting))))
            elif self.runs_immediately(queue):
                self.run_until(queue.end)

    def runs_immediately(self, queue: Queue) -> bool:
        """Return whether its tasks run as soon as they are submitted."""
        match self.policy:
            case "eager":
                return True
            case "late-copies":
                return queue.number == 0
            case "late-compute":
                return queue.number != 0
        return False

    def run_until(self, mark: Mark) -> None:
        """Run the tasks up to a mark, and the tasks that those wait for."""
        if mark.queue.done >= mark.tasks:
            return
        with self.lock:
            if self._running:
                self._run(mark)
                return
            self._running = True
            try:
                # Ignore the settings of the waiting thread: a default device, or an inference mode.
                with torch._C.DisableTorchFunction(), torch.inference_mode():
                    self._run(mark)
            finally:
                self._running = False

    def _run(self, mark: Mark) -> None:
        queue = mark.queue
        while queue.begun < mark.tasks:
            task = queue.waiting.popleft()
            queue.begun += 1
            try:
                if task.after is not None:
                    self._run(task.after)
                if task.run is not None:
                    task.run()
            except Exception as error:
                place = f"stream {queue.number} of cuda:{queue.device}"
                raise SimulatedCudaError(f"{task.name} failed in {place}: {error!r}") from error
            finally:
                queue.done += 1
