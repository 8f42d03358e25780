"""Seconds of a pass; those of layers on a GPU are known when it has computed what was launched."""

from dataclasses import dataclass, field

import torch


def mark(device: torch.device) -> torch.cuda.Event | None:
    """An event behind what has been launched on a device; None for a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """A layer between two events.

    Args:
        device: That computes it.
        first: Event in front of the layer.
        last: Event behind it.
        asked: Seconds that the host waited for the layer's weights before it launched the layer.
        stalled: Seconds that the host waited for experts while it launched the layer.
    """

    device: torch.device
    first: torch.cuda.Event
    last: torch.cuda.Event
    asked: float
    stalled: float

    def computed(self) -> float:
        """Seconds between the events, in which the layer did not wait for experts. Waits for the layer."""
        self.last.synchronize()
        return max(_seconds(self.first, self.last) - self.stalled, 0.0)

    def waited(self, before: "DeviceTime | None") -> float:
        """Seconds that the device waited for weights, with nothing to compute since the layer before.

        While the device is still busy with that, the host may wait and the device does not. Both layers must
        have been computed.
        """
        idle = self.asked
        if before is not None and before.device == self.device:
            idle = min(idle, max(_seconds(before.last, self.first), 0.0))
        return idle + self.stalled


def _seconds(first: torch.cuda.Event, last: torch.cuda.Event) -> float:
    milliseconds: float = first.elapsed_time(last)
    return milliseconds / 1000


@dataclass(slots=True)
class Spent:
    """Where a pass's time went: layers that are done, seconds computed in them, seconds waited for them.

    cpu_layers, cpu_computed: those of them that the CPU computed beside a device, and their seconds. timed:
    layers on a GPU, whose seconds `read` adds when they have been computed.
    """

    layers: int = 0
    computed: float = 0.0
    waited: float = 0.0
    cpu_layers: int = 0
    cpu_computed: float = 0.0
    timed: list[DeviceTime] = field(default_factory=list)

    def add(self, computed: float, waited: float, *, beside: bool) -> None:
        """Count one layer more. beside: whether the CPU computed it beside a device."""
        self.layers += 1
        self.computed += computed
        self.waited += waited
        if beside:
            self.cpu_layers += 1
            self.cpu_computed += computed

    def add_timed(self, layer: DeviceTime) -> None:
        """Count one layer more, on a GPU."""
        self.layers += 1
        self.timed.append(layer)

    def read(self) -> None:
        """Add the seconds of layers on GPUs; waits until they have been computed."""
        before: DeviceTime | None = None
        for layer in self.timed:
            self.computed += layer.computed()
            self.waited += layer.waited(before)
            before = layer
        self.timed.clear()
