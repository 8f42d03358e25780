"""Timing of a pass; times of GPU layers are available once the GPU has finished them."""

from dataclasses import dataclass, field

import torch


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """Record an event after all work launched on a device; return None for a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Time of a layer on a GPU, between two events.

    Args:
        device: Compute device of the layer.
        first: Event before the layer.
        last: Event after the layer.
        weight_wait: Seconds that the host waited for the layer's weights before launching it.
        expert_wait: Seconds that the host waited for experts while launching the layer.
    """

    device: torch.device
    first: torch.cuda.Event
    last: torch.cuda.Event
    weight_wait: float
    expert_wait: float

    def computed(self) -> float:
        """Return the seconds between the events, without waits for experts. Waits for the layer to finish."""
        self.last.synchronize()
        return max(_seconds(self.first, self.last) - self.expert_wait, 0.0)

    def waited(self, before: "LayerTime | None") -> float:
        """Return the seconds that the device was idle for lack of weights since the previous layer, `before`.

        Host waits while the device is still computing that layer do not count. Both layers must have
        finished.
        """
        idle = self.weight_wait
        if before is not None and before.device == self.device:
            idle = min(idle, max(_seconds(before.last, self.first), 0.0))
        return idle + self.expert_wait


def _seconds(first: torch.cuda.Event, last: torch.cuda.Event) -> float:
    milliseconds: float = first.elapsed_time(last)
    return milliseconds / 1000


@dataclass(slots=True)
class PassTime:
    """Time of a pass by layer.

    Args:
        layers: Number of finished layers.
        computed: Seconds of computation in these layers.
        waited: Seconds of waiting for their weights.
        cpu_layers: Number of layers computed on the CPU while a GPU computes the others.
        cpu_computed: Seconds of computation in the CPU layers.
        timed: Layers on a GPU whose times `read` has yet to add.
    """

    layers: int = 0
    computed: float = 0.0
    waited: float = 0.0
    cpu_layers: int = 0
    cpu_computed: float = 0.0
    timed: list[LayerTime] = field(default_factory=list)

    def add(self, computed: float, waited: float, *, on_cpu: bool) -> None:
        """Add a layer. `on_cpu`: whether the CPU computed it while a GPU computes others."""
        self.layers += 1
        self.computed += computed
        self.waited += waited
        if on_cpu:
            self.cpu_layers += 1
            self.cpu_computed += computed

    def add_timed(self, layer: LayerTime) -> None:
        """Add a layer on a GPU."""
        self.layers += 1
        self.timed.append(layer)

    def read(self) -> None:
        """Add the times of layers on GPUs, after waiting for them to finish."""
        before: LayerTime | None = None
        for layer in self.timed:
            self.computed += layer.computed()
            self.waited += layer.waited(before)
            before = layer
        self.timed.clear()
