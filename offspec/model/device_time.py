"""Seconds of layers on a GPU, which computes after the calls that launch its work have returned."""

from dataclasses import dataclass

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
