"""The simulated machine: its devices, each thread's selection, and its counters."""

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tests.support.simulated_cuda.callers import caller
from tests.support.simulated_cuda.errors import SimulatedCudaError
from tests.support.simulated_cuda.memory import Allocator, Block
from tests.support.simulated_cuda.streams import Mark, Queue, Scheduler, Span, Task

if TYPE_CHECKING:
    from tests.support.simulated_cuda.graphs import Recording


@dataclass(slots=True)
class Device:
    """One device.

    users: streams that use memory of others, by its start address. kept: blocks without an owner, and how far
    their users have to get before they are free. busy: whether its allocator is at work.
    """

    index: int
    allocator: Allocator
    streams: list[Queue]
    users: dict[int, set[Queue]] = field(default_factory=dict)
    kept: list[tuple[Block, list[Mark]]] = field(default_factory=list)
    busy: bool = False

    def offset(self, storage: torch.UntypedStorage) -> int:
        """Return the offset of memory from the start of the device."""
        return storage.data_ptr() - self.allocator.bytes.data_ptr()


class Machine:
    """Devices with `total` bytes each, and the policy that determines when their tasks run.

    counts: launches and replays. waits: host synchronizations, by (cause, file:line). copied: bytes, by
        direction. pinned: sizes of registered host memory, by address. misused: memory that was given back
        before a copy
        used it.
    """

    def __init__(self, policy: str = "eager", total: int = 2 << 30, devices: int = 2) -> None:
        self.scheduler = Scheduler(policy)
        poison = policy != "sizes"
        self.devices = [
            Device(
                index,
                Allocator(total, poison=poison, settle=self.settle),
                [self.scheduler.add(Queue(index, 0))],
            )
            for index in range(devices)
        ]
        self.counts: Counter[str] = Counter()
        self.waits: Counter[tuple[str, str]] = Counter()
        self.copied: Counter[str] = Counter()
        self.pinned: dict[int, int] = {}
        self.misused: list[str] = []
        self.recordings: list[Recording] = []
        self._selected = threading.local()
        self._pools = 0

    # The selection of a thread: a device, and a stream on each.

    @property
    def device(self) -> int:
        return getattr(self._selected, "device", 0)

    @device.setter
    def device(self, index: int) -> None:
        if not 0 <= index < len(self.devices):
            raise SimulatedCudaError(f"CUDA error: invalid device ordinal {index}")
        self._selected.device = index

    def current_queue(self, device: int | None = None) -> Queue:
        index = self.device if device is None else device
        numbers: dict[int, int] = getattr(self._selected, "streams", {})
        return self.devices[index].streams[numbers.get(index, 0)]

    def select(self, queue: Queue) -> None:
        """Make a stream current on its device, and that device current."""
        self.device = queue.device
        numbers: dict[int, int] = getattr(self._selected, "streams", {})
        self._selected.streams = {**numbers, queue.device: queue.number}

    def new_queue(self, device: int) -> Queue:
        streams = self.devices[device].streams
        streams.append(self.scheduler.add(Queue(device, len(streams))))
        return streams[-1]

    def new_pool(self) -> tuple[int, int]:
        self._pools += 1
        return 0, self._pools

    # Tasks, and waiting for them.

    def launch(
        self,
        name: str,
        run: Callable[[], object],
        device: int | None = None,
        counted: int = 1,
        spans: tuple[Span, ...] = (),
    ) -> None:
        """Submit a task to the current stream."""
        self.counts["launches"] += counted
        self.scheduler.submit(self.current_queue(device), Task(name, run, spans=spans))

    def record_error(self, error: int) -> int:
        """Return the runtime's result of a call, and keep it as the thread's last error, as CUDA does."""
        self._selected.error = error
        return error

    def check_launch(self) -> None:
        """Report the last error once. torch does this after each of its kernels, Triton does not."""
        error = getattr(self._selected, "error", 0)
        if error:
            self._selected.error = 0
            raise SimulatedCudaError(f"CUDA error: {error}, of this launch or of a call before it")

    def host_waits(self, cause: str, marks: Sequence[Mark] | None = None) -> None:
        """Wait for marks of the device, or for everything. Not allowed during the capture of a graph."""
        self.forbid_in_capture(cause)
        self.waits[cause, caller()] += 1
        if self.scheduler.policy == "sizes":
            return
        for mark in [queue.end for queue in self.scheduler.queues] if marks is None else marks:
            self.scheduler.run_until(mark)

    def forbid_in_capture(self, cause: str) -> None:
        for recording in self.recordings:
            if recording.forbids():
                recording.failed = True
                raise SimulatedCudaError(f"operation not permitted when stream is capturing: {cause}")

    def settle(self) -> None:
        """Run all pending tasks, without counting it."""
        for queue in tuple(self.scheduler.queues):
            self.scheduler.run_until(queue.end)

    @property
    def syncs(self) -> int:
        """Number of times that the host has waited."""
        return sum(self.waits.values())

    def reset_counts(self) -> None:
        for counter in (self.counts, self.waits, self.copied):
            counter.clear()

    # Memory.

    def allocate(self, nbytes: int, device: int, written: bool = False) -> torch.UntypedStorage:
        """Allocate memory of the current stream, filled with NaN until something writes it.

        written: the next task of the stream writes all of it.
        """
        queue, of = self.current_queue(device), self.devices[device]
        recording = queue.recording
        with self.scheduler.lock:
            self._free_kept(of)
            with self._at_work(of):
                block = of.allocator.allocate(nbytes, queue.number, recording.pool if recording else None)
        start, end = block.start, block.start + nbytes
        if not (written and self.scheduler.runs_immediately(queue) and recording is None):
            room = of.allocator.bytes[start:end]
            self.scheduler.submit(queue, Task("poison", lambda: room.fill_(0xFF)))
        view = memoryview(of.allocator.memory)[start:end]
        weakref.finalize(view, self._give, of, block).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()

    def uses(self, storage: torch.UntypedStorage, device: int, queue: Queue) -> None:
        """Note that another stream uses memory, which is free only after that stream has got this far."""
        of = self.devices[device]
        of.users.setdefault(of.offset(storage), set()).add(queue)

    def _give(self, device: Device, block: Block) -> None:
        with self.scheduler.lock:
            users, owner = device.users.pop(block.start, set()), device.streams[block.lane.stream]
            if block.lane.pool is None:  # memory of a graph stays reserved as long as the graph exists
                span = Span(device.index, block.start, block.start + block.size)
                self.check_given_back(span, owner, users)
            device.kept.append((block, [queue.end for queue in users]))
            self._free_kept(device)

    def check_given_back(self, span: Span, owner: Queue | None = None, users: Collection[Queue] = ()) -> None:
        """Record copies that have yet to use memory which gets another owner now.

        Args:
            span: The memory.
            owner: The stream that uses it next. Default: any stream, or the host.
            users: Streams whose use of it delays its release.
        """
        with self.scheduler.lock:
            for queue in self.scheduler.queues:
                if queue is not owner and queue not in users:
                    place = f"in stream {queue.number} of cuda:{queue.device}"
                    self.misused += [f"{task.name} {place}" for task in queue.using(span, owner)]

    def _free_kept(self, device: Device) -> None:
        if device.busy:
            return  # garbage was collected in the middle of this: next time
        with self._at_work(device):
            kept, device.kept = device.kept, []
            for block, marks in kept:
                if all(mark.queue.done >= mark.tasks for mark in marks):
                    device.allocator.free(block)
                else:
                    device.kept.append((block, marks))

    @contextmanager
    def _at_work(self, device: Device) -> Iterator[None]:
        device.busy = True
        try:
            yield
        finally:
            device.busy = False

    def release(self) -> None:
        """Have each device release memory that is reserved and unused."""
        with self.scheduler.lock:
            for device in self.devices:
                with self._at_work(device):
                    device.allocator.release()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        start = tensor.data_ptr()
        end = start + tensor.numel() * tensor.element_size()
        return any(first <= start and end <= first + size for first, size in self.pinned.items())


_installed: list[Machine] = []


def machine() -> Machine:
    """Return the machine installed in this process."""
    return _installed[0]


def install(new: Machine) -> None:
    _installed.append(new)


def is_installed() -> bool:
    return bool(_installed)
